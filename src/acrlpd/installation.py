"""How this installation of acrlpd gets an optional part, so that messages name a line that works here."""

import importlib.metadata
import json


def install_command(extra: str) -> str:
    """The line that installs an extra: in a checkout from the checkout, otherwise from where the package came from."""
    package = f"-e '.[{extra}]'" if _is_checkout() else f"'acrlpd[{extra}]'"
    return f"pip install {package}"


def _is_checkout() -> bool:
    """Whether the package is installed in editable form. A package that is not installed runs from a checkout, too."""
    try:
        installed = importlib.metadata.distribution("acrlpd")
    except importlib.metadata.PackageNotFoundError:
        return True
    # pip keeps here where an installation came from; there is no such file for a package from an index.
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable", False))
