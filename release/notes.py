"""Release notes: from the changelog, or else from the commits since the last tag."""

import re
from collections.abc import Sequence


def write_notes(version: str, changelog: str, commits: Sequence[str], since: str) -> tuple[str, str]:
    """Return (the notes in Markdown, where they come from).

    The changelog's section of `version` comes first, then its section `Unreleased`, then the subjects of `commits`. `since`: the last tag;
    empty: there is none.
    """
    for title in (version, "Unreleased"):
        if text := find_section(changelog, title):
            return f"# Fairlead {version}\n\n{text}\n", f"CHANGELOG.md, section {title}"
    source = f"commits since {since}" if since else "all commits: there is no tag"
    return f"# Fairlead {version}\n\n{group_commits(commits)}\n", source


def find_section(changelog: str, title: str) -> str:
    """Return the text below a `## ` heading that names `title`, with or without brackets and a date; empty if there is none."""
    heading = re.search(rf"^## \[?v?{re.escape(title)}\]?(?:\s.*)?$", changelog, re.M | re.I)
    if heading is None:
        return ""
    rest = changelog[heading.end() :]
    following = re.search(r"^## ", rest, re.M)
    return rest[: following.start() if following else None].strip()


def group_commits(commits: Sequence[str]) -> str:
    """Return subjects such as `router: bound trailer bytes` as lists, one for each scope."""
    scopes: dict[str, list[str]] = {}
    for subject in commits:
        scope, colon, text = subject.partition(": ")
        scopes.setdefault(scope if colon else "other", []).append(text if colon else subject)
    return "\n\n".join(f"## {scope}\n\n" + "\n".join(f"- {text}" for text in scopes[scope]) for scope in sorted(scopes))
