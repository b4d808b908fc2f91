"""uv is told what pip knows."""

from __future__ import annotations

import pytest

from repo.index import parse_pip_config, uv_environment

LISTED = """\
:env:.find-links='/wheels /more'
global.extra-index-url='https://one.test/simple\\nhttps://two.test/simple'
global.find-links='/ignored'
global.index-url='https://index.test/simple'
install.no-index='false'
global.cert='/ca.pem'
:env:.default-timeout='180'
freeze.user='true'
not a setting
"""


def test_variables_win_over_files():
    found = parse_pip_config(LISTED)
    assert found["find-links"] == "/wheels /more"
    assert found["extra-index-url"].split() == ["https://one.test/simple", "https://two.test/simple"]
    assert "user" not in found


def test_translation():
    assert uv_environment(parse_pip_config(LISTED), {}) == {
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_DEFAULT_INDEX": "https://index.test/simple",
        "UV_INDEX": "https://one.test/simple https://two.test/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "180",
    }


def test_what_the_user_set_for_uv_stays():
    assert "UV_FIND_LINKS" not in uv_environment({"find-links": "/a"}, {"UV_FIND_LINKS": "/b"})


@pytest.mark.parametrize("settings", [{}, {"find-links": ""}, {"no-index": "0"}])
def test_nothing_said_nothing_set(settings):
    assert uv_environment(settings, {}) == {}
