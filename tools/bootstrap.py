#!/usr/bin/env python3
"""The first commands: `python3 tools/bootstrap.py quickstart`, and `python3 tools/bootstrap.py tests`.

Makes (or reuses) `.venv` beside this repository, puts nox and uv into it, and hands over to the nox session of the same
name. Standard library only. Written for old syntax on purpose: an old Python must get as far as the message that says
so. What follows the session's name goes to nox: `tests -- -k checkpoint`. `tests --changed` runs what a change since
`main` touches, `tests --changed=BASE` since another one.

`python tools/bootstrap.py install zero ckpt` is the third: it installs single packages of the checkout, with those that they need, into the
environment of the Python that runs it.
"""

import sys

OLDEST = (3, 11)
SESSIONS = ("quickstart", "tests")


def main(argv):
    if sys.version_info < OLDEST:
        found, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST))
        return refuse(
            "This is Python %s; %s or newer is needed." % (found, needed),  # noqa: UP031
            "Run the same command with a newer one, for example: python%s tools/bootstrap.py tests" % needed,  # noqa: UP031
        )
    is_install = len(argv) > 2 and argv[1] == "install"
    if not is_install and (len(argv) < 2 or argv[1] not in SESSIONS):
        return refuse(
            "usage: python3 tools/bootstrap.py {%s} [arguments of nox]\n" % "|".join(SESSIONS)  # noqa: UP031
            + "       python tools/bootstrap.py install PACKAGE ...    (zero, ckpt, ...: into the environment of this Python)",
            "",
        )
    # The folder of this file is on sys.path because it was run as a script.
    from repo import install

    try:
        if is_install:
            install.install_packages(argv[2:], sys.executable)
            return 0
        python = install.ensure_environment()
    except install.InstallError as error:
        return refuse(error.message, error.fix)
    rest = argv[2:]
    if rest and rest[0].split("=")[0] == "--changed":
        rest = ["--", *rest]
    return install.hand_over(python, argv[1], rest)


def refuse(what, fix):
    sys.stderr.write("bootstrap: " + what + "\n" + ("  " + fix + "\n" if fix else ""))
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
