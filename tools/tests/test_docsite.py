"""The documentation site: its pure parts. What takes minutes (building, following tutorials, a browser) is `nox -s docs`."""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePosixPath

import pytest
from docsite import api, blocks, examples, generated, links, prose, ranking, tables

from repo import ROOT
from repo.bars import Bar, Chart, svg
from repo.errors import page, sections
from repo.pictures import PICTURES

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


# ---- API -------------------------------------------------------------------------------------------------------------


def test_every_public_symbol_has_its_place_on_an_api_page(projects):
    pages, missing, count = api.api_pages(), [], 0
    for project in projects.values():
        if project.opt_in:
            continue
        text = pages[f"reference/api/{project.name}.md"]
        for module in api.public_modules(project):
            for symbol in module.homes:
                count += 1
                path = f"{module.name}.{symbol}"
                if f"::: {path}\n" not in text and f'<span id="{path}"></span>' not in text:
                    missing.append(path)
    assert missing == []
    assert count > 500


def test_an_api_page_begins_with_what_people_need_first():
    text = api.api_pages()["reference/api/ds-zero.md"]
    entries = re.findall(r"^::: (\S+)", text, re.MULTILINE)
    assert entries[0].endswith(".shard")
    assert text.index("ds_zero.shard(") < text.index(":::"), "the page opens with an example"
    assert "| `clip` | `None` |" in text, "options behind **options stand in a table with their defaults"
    assert entries.index("ds_zero.layout.shard_options.ShardOptions") < 10


def test_no_option_of_shard_lacks_a_meaning():
    import ds_zero

    rows = api.option_table("shard", ds_zero.shard)[4:-1]
    assert len(rows) > 10
    assert [row for row in rows if row.rstrip().endswith("| |") or row.split("|")[3].strip() == ""] == []


def test_most_functions_have_an_example():
    uses, without, count = examples.find_uses(), [], 0
    for project in generated.projects():
        for module in [] if project.opt_in else api.public_modules(project):
            for symbol, home in module.homes.items():
                if home.rpartition(".")[2][0].islower():
                    count += 1
                    without += [home] if not (uses.get(f"{module.name}.{symbol}") or uses.get(home)) else []
    assert len(without) < count / 5, without


def test_a_docstring_has_a_section_for_each_label():
    pytest.importorskip("griffe")  # of the documentation's own environment
    from docsite import docstrings

    text = "Sum.\n\nArgs:\n    x: It.\nReturns: the sum,\nof all.\nCollective over the group. Cost: one message."
    assert docstrings.with_sections(text).split("\n\n") == [
        "Sum.",
        "Args:\n    x: It.",
        "Returns:\n    the sum,\n    of all.\n    Collective over the group.",
        "Cost:\n    one message.",
    ]


def test_every_command_is_on_the_page():
    from ds_config.command_discovery import commands

    text = generated.cli_page()
    assert [name for name in commands() if f"## `ds {name}`\n" not in text] == []
    assert "`--nproc NPROC" in text or "`--nproc" in text


def test_links_of_a_readme_lead_to_pages():
    text = "[a](../../docs/concepts/plan.md#x) [b](CHANGELOG.md) [c](src/x.py) [d](https://e.f) `[e](x.md)`"
    moved = generated.from_readme(text, PurePosixPath("packages/zero"), PurePosixPath("docs/packages/zero.md"))
    assert moved == "[a](../concepts/plan.md#x) [b](../changelog.md) c [d](https://e.f) `[e](x.md)`".replace(
        "`[e](x.md)`", "`e`"
    )


def test_all_changelogs_are_on_one_page(projects):
    text = generated.changelog_page()
    assert [p.name for p in projects.values() if f"\n## {p.name}\n" not in text] == []


# ---- errors and keys -------------------------------------------------------------------------------------------------


def test_an_error_code_is_its_anchor():
    """What a message prints after `#` is what the heading becomes on the site."""
    strange = [code for code in sections(page()) if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code)]
    assert strange == []


def test_ds_explain_knows_every_code():
    from ds_config.explain_command import explanations

    assert explanations().keys() == sections(page()).keys()


# ---- tutorials -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)
def test_a_tutorial_ends_with_something_seen(file: Path):
    steps = list(blocks.steps(file.read_text()))
    if file.stem == "index":
        assert steps == []
        return
    assert any(isinstance(step, blocks.Run) for step in steps)
    assert any(isinstance(step, blocks.Picture | blocks.Expect) for step in steps)
    for step in steps:
        if isinstance(step, blocks.Picture):
            assert (file.parent / step.shown).is_file()
            assert f"]({step.shown})" in file.read_text()


def test_every_tutorial_is_on_the_list_and_in_the_navigation():
    listed, nav = (ROOT / "docs/tutorials/index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    names = [file.name for file in TUTORIALS if file.stem != "index"]
    assert [name for name in names if f"({name})" not in listed or f"tutorials/{name}" not in nav] == []


def test_steps_of_a_page():
    text = (
        '```json title="a.json"\n{}\n```\n\n```sh\nls\n```\n```text\nx 1\n```\n<!-- picture: p.png -> img/q.png -->\n'
        '```sh title="exits with 86"\nno\n```\n```sh title="not run here: x"\nno\n```\n```text\nnot seen\n```\n'
    )
    found = list(blocks.steps(text))
    kinds = [type(step).__name__ for step in found]
    assert kinds == ["Write", "Run", "Expect", "Picture", "Run"]
    assert (found[0].name, found[1].status, found[4].status) == ("a.json", 0, 86)


def test_python_that_nobody_would_run_is_refused():
    with pytest.raises(ValueError, match="line 1: a block of Python needs a title"):
        list(blocks.steps("```python\nx = 1\n```\n"))


@pytest.mark.parametrize(
    ("expected", "output", "lost"),
    [
        ("step 20: loss 3.30\n...\nend\n", "a\nstep 20: loss 3.41\nb\nend\n", []),
        ("end\nstep 1\n", "step 1\nend\n", ["step 1"]),
        ("memory 12 MiB\n", "memory 1,024.5 MiB\n", []),
        ("rank 0 waits ...\n", "rank 1 waits since 8.1 s for x\n", []),
        ("rank 0 waits\n", "rank 0 waited\n", ["rank 0 waits"]),
    ],
)
def test_what_a_page_says_is_looked_for_in_the_output(expected, output, lost):
    assert blocks.missing(expected, output) == lost


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def test_every_benchmark_page_begins_with_a_picture():
    pages = list((ROOT / "docs" / "benchmarks").glob("*.md"))
    first = {file.name: re.findall(r"^(?:!\[|\[!\[|\|)", file.read_text(), re.MULTILINE)[:1] for file in pages}
    assert [name for name, found in first.items() if found not in (["!["], ["[!["])] == []


def test_every_picture_is_on_a_page():
    texts = "".join(f.read_text() for f in [*(ROOT / "docs").rglob("*.md")])
    assert [name for name in PICTURES if f"img/{name}.svg" not in texts] == []


def test_bars_are_as_long_as_their_numbers():
    text = svg([Chart("a & b", "less", "ms", [Bar("ours", 10.0, "ours"), Bar("theirs", 40.0)])])
    widths = [float(width) for width in re.findall(r"width='([\d.]+)' height='18'", text)]
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.01)
    assert "a &amp; b" in text


def test_tutorials_howtos_and_concepts_are_longer_than_benchmarks():
    def words(*folders: str) -> int:
        return sum(len(f.read_text().split()) for name in folders for f in (ROOT / "docs" / name).glob("*.md"))

    assert words("tutorials", "how-to", "concepts") > words("benchmarks")


# ---- glossary --------------------------------------------------------------------------------------------------------


def test_links_to_the_glossary_have_their_anchors():
    page = (ROOT / "docs/concepts/glossary.md").read_text()
    for file in [*(ROOT / "docs").rglob("*.md")]:
        for anchor in re.findall(r"glossary\.md#([\w-]+)", file.read_text()):
            assert f'id="{anchor}"' in page, f"{file.name}: {anchor}"


# ---- checks of the built site ----------------------------------------------------------------------------------------


def test_dead_links_dead_anchors_and_other_hosts_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x">1</a><a href="b.html#y">2</a><a href="c.html">3</a><img src="d.png">'
    )
    (tmp_path / "b.html").write_text('<h1 id="x">b</h1><script src="https://cdn.example/x.js"></script>')
    assert links.broken(tmp_path) == [
        "a.html: b.html#y (no such anchor)",
        "a.html: c.html",
        "a.html: d.png",
    ]
    assert links.foreign(tmp_path) == ["b.html: https://cdn.example/x.js"]


def test_a_cell_knows_its_heading_and_code_in_it_may_break():
    page = "<table><thead><tr><th>key</th><th>what &amp; why</th></tr></thead><tbody><tr><td><code>a.b_c&lt;d</code></td><td>x</td></tr></tbody></table>"
    found = tables.label_cells(page)
    assert '<td data-label="key"><code>a.<wbr>b_<wbr>c&lt;d</code></td>' in found
    assert '<td data-label="what &amp; why">x</td>' in found
    assert tables.with_breaks("ops.DeepSpeedTransformerLayer") == "ops.<wbr>Deep<wbr>Speed<wbr>Transformer<wbr>Layer"
    assert (
        tables.with_breaks('GradScaler <b id="LongNamesInTagsStayWhole">')
        == 'GradScaler <b id="LongNamesInTagsStayWhole">'
    )


def test_the_search_hides_decisions_and_ranks_guides_before_benchmarks():
    settings = ranking.read()
    meta: dict[str, dict[str, dict[str, object]]] = {"decision": {}, "guide": {}, "bench": {}, "key": {}}
    ranking.apply("decisions/measured/zero.md", meta["decision"])
    ranking.apply("how-to/out-of-memory.md", meta["guide"])
    ranking.apply("benchmarks/zero.md", meta["bench"])
    ranking.apply("reference/configuration.md", meta["key"])
    assert meta["decision"]["search"]["exclude"] is True
    assert "oom" in meta["guide"]["tags"]
    assert meta["guide"]["search"]["boost"] > meta["bench"]["search"]["boost"]
    assert meta["key"]["search"]["boost"] == settings.boost["reference/configuration.md"]
    assert len(settings.terms) >= 40


def test_a_page_that_is_not_first_and_a_hidden_one_are_told():
    settings = ranking.Ranking(["decisions/"], {}, {}, {"oom": ["a.html"], "lora": ["b.html", "c.html"]})
    found = {"oom": ["x.html", "decisions/0.html"], "lora": ["c.html"]}
    assert ranking.problems(found, settings) == [
        "search 'oom': first is x.html, not a.html",
        "search 'oom' shows decisions/0.html",
    ]


def test_the_search_settings_name_pages_that_exist():
    generated_pages = {"reference/cli.md", "reference/api/", "changelog.md", "packages/", "decisions/"}
    settings = ranking.read()
    named = [
        *settings.tags,
        *settings.boost,
        *(p.replace(".html", ".md") for ps in settings.terms.values() for p in ps),
    ]
    assert [name for name in named if name not in generated_pages and not (ROOT / "docs" / name).exists()] == []


def test_prose_finds_long_sentences_and_riddles_outside_code():
    long = " ".join(["word"] * (prose.MOST_WORDS + 1)) + "."
    assert len(prose.problems(long)) == 1
    assert prose.problems(f"```\n{long}\n```\n") == []
    assert prose.problems("A stranger calls.")[0].startswith("'stranger': write")
    assert prose.problems("| a | " + long + " |") == []
    assert prose.problems("The run goes on from the newest.") == ["'goes on from': write resume, continue"]
    assert prose.problems("Training goes on.") == []


def test_docstrings_messages_and_help_use_the_words_of_the_field() -> None:
    assert prose.words_of_code() == []


def test_messages_of_errors_are_read() -> None:
    tree = ast.parse(
        'def f():\n    """Do nothing: reason."""\n    raise ValueError(f"a seat {1}", fix="take the twin")\n'
    )
    assert {text for _, text in prose.spoken(tree)} == {"Do nothing: reason.", "a seat ", "take the twin"}
