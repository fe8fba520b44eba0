"""A shell script that starts vLLM by one simple command. All else in a script may change what runs, and is refused. Pure.

Own code: `shlex` takes a `#` inside a word for a comment, and joins the lines around a comment.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from fairlead.migrate.command_line import are_arguments, find_server, read_arguments
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, show
from fairlead.migrate.pods import read_env

_VARIABLE = r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::-([\w./:@,+-]*))?\})"
_TOKEN = re.compile(
    r"(?P<comment>(?<![^\s;&|])#[^\n]*)|(?P<quoted>'[^']*')|(?P<double>\"(?:\\.|[^\"\\])*\")|(?P<escaped>\\\r?.)"
    r"|(?P<output>(?<![^\s;&|])[\d&]?>>?[ \t]*(?:&\d|[\w./-]+)(?=[\s;&|]|$))"
    rf"|(?P<end>\n|;|&&|\|(?=[ \t]*tee\s))|(?P<variable>{_VARIABLE})"
    r"|(?P<space>[ \t\r]+)|(?P<plain>[^\s;&|<>()$`{}*?'\"\\]+)|(?P<other>\S+)|(?P<letter>\s)",
    re.DOTALL,
)
_NO_FILE = re.compile(r"[\d&]?>>?[ \t]*(&\d|/dev/(null|stdout|stderr))")
_NEEDLESS = {
    "cd": "vLLM needs no working directory: write absolute paths",
    "echo": "it only wrote to the log: nothing to do",
    "sleep": "workers start at once: nothing to do",
    "ulimit": "workers have the limits of the node's container runtime: set them there if vLLM needs it",
}
_CHANGES_IMAGE = re.compile(r"(.*/)?(pip[\d.]*|uv|conda|source|\.|apt|apt-get|apk|dnf|yum|microdnf|python[\d.]* -m pip)")
_COMMANDS = re.compile(rf"[A-Za-z_]\w*=.*|exec|export|set|{'|'.join(_NEEDLESS)}|(.*/)?(vllm|python[\d.]*)|.*/api_server\.py", re.DOTALL)
_OPTION = re.compile(r"[-+][eouvx]+|pipefail|errexit|nounset|xtrace")
_CONSTRUCTS = {"&": "a command in the background", "|": "a pipe", "||": "an alternative", "<": "an input", ">": "an output"}
_CONSTRUCTS |= {"(": "a function, subshell or array", "'": "a quote without its end", '"': "a quote without its end"}
_CONSTRUCTS |= dict.fromkeys("*?{}~", "a pattern or group") | dict.fromkeys("$`", "a substitution")


def read_command(draft: Draft, words: Sequence[str], source: str, *, serves: bool = False) -> bool:
    """Read the flags of a command line into the draft; return whether it starts vLLM. `serves`: the image's entrypoint is vLLM."""
    option = next((number for number, word in enumerate(words[:6]) if re.fullmatch(r"-[a-z]*c", word)), 0)
    if option and re.fullmatch(r"(.*/)?(ba|da|z|a|)sh", words[0]) and words[option + 1 :]:
        if words[option + 2 :]:
            draft.note(source, "the shell does not give it to vLLM: nothing to do", " ".join(words[option + 2 :]))
        words = read_script(draft, words[option + 1], source)
    program, start = find_server(words)
    if program < 0 and not (serves and are_arguments(words)):
        return False
    if program > 0:
        draft.note(source, "the program that starts vLLM was not carried over: check whether you need it", " ".join(words[:program]))
    read_arguments(draft, words[start if program >= 0 else int(words[:1] == ["serve"]) :], source)
    return True


def read_script(draft: Draft, script: str, source: str) -> list[str]:
    """Return the words of the command that starts vLLM; set the variables of the script. Raises NotMigratable for all else."""
    reader = _Reader(draft, source)
    script = draft.expand(script, shell=True) + "\n"
    for token in _TOKEN.finditer(script):
        reader.line = script.count("\n", 0, token.start()) + 1
        reader.read(str(token.lastgroup), token.group())
    if reader.joined:
        reader.refuse(reader.joined, "no command after it")
    return reader.server or reader.refuse("", "no command starts vLLM")


@dataclass
class _Reader:
    """Reads the tokens of a script. `text`, `outputs`: of the present command, without variables. `joined`: `&&` or `|` before it.

    `server`: words of the command that starts vLLM.
    """

    draft: Draft
    source: str
    line: int = 1
    text: str = ""
    outputs: list[str] = field(default_factory=list)
    joined: str = ""
    own: dict[str, str] = field(default_factory=dict)
    server: list[str] = field(default_factory=list)

    def refuse(self, text: str, what: str = "") -> NoReturn:
        if not what and _CHANGES_IMAGE.fullmatch(text):
            raise NotMigratable(
                f"{self.source}: line {self.line} of the script: {show(text)}: it changes the image: build an image with it"
            )
        what = what or _CONSTRUCTS.get(text, _CONSTRUCTS.get(text[:1], "another command"))
        where = f"{self.source}: line {self.line} of the script: {f'{show(text)}: ' if text else ''}{what}"
        raise NotMigratable(f"{where}; only one simple command is read: write vLLM's arguments, command: [vllm, serve] and args")

    def read(self, kind: str, text: str) -> None:
        if kind == "end":
            self._end(text)
        elif kind == "letter":
            self.refuse("", f"{text!a}, which a shell takes for a letter")
        elif kind == "output":
            self.outputs.append(text)
            self.draft.note(self.source, "workers write to the log of the pod", text)
        elif kind == "other" or (kind == "plain" and (self._has_home(text) or self._is_other_command(text))):
            self.refuse(text)
        elif kind == "variable":
            value = re.sub(_VARIABLE, self._value, text)
            if re.search(r"['\"\\*?]", value):
                self.refuse(text, "quotes or patterns in a variable outside quotes")
            self.text += value
        elif kind == "double":
            if re.search(r"(?<!\\)(`|\$(?!\{?[A-Za-z_]))|\\[$`]", text) or "${" in re.sub(_VARIABLE, "", text):
                self.refuse(text, "a substitution")
            self.text += re.sub(_VARIABLE, lambda match: re.sub(r'(["\\])', r"\\\1", self._value(match)), re.sub(r"\\\r?\n", "", text))
        elif kind != "comment" and not (kind == "escaped" and text[-1] == "\n"):
            self.text += text

    def _is_other_command(self, text: str) -> bool:
        return not self.text.strip() and text != "tee" and _COMMANDS.fullmatch(text) is None

    def _has_home(self, text: str) -> bool:
        """Return whether a shell replaces a `~`. It does not in `--name=~`, which is no variable."""
        word = re.split(r"(?<!\\)[ \t\r]", self.text)[-1] + text
        return re.search(r"(^|[=:])~", word) is not None and re.fullmatch(r"--?[\w.-]+=[^'\"\\]*", word) is None

    def _value(self, match: re.Match[str]) -> str:
        """Return the value of a variable. One that the kubelet alone knows stays, as `$(NAME)`."""
        name, default, known = match[1] or match[2], match[3], self.draft.variables | self.own
        if (value := known.get(name, "")) is None:
            return f"$({name})"
        if name not in known and (default is None or "envFrom" in self.draft.container):
            self.refuse(match.group(), "no variable of the container has this name: write its value")
        return value or default or ""

    def _end(self, text: str) -> None:
        """Run the present command, which `text` ends."""
        words = shlex.split(self.text)
        if not self.text.strip() and not self.outputs:
            if text != "\n":
                self.refuse(text, "no command before it")
            return
        self._run(words)
        if not self.server and (file := next((one for one in self.outputs if not _NO_FILE.fullmatch(one)), "")):
            self.refuse(file, "a file that the script writes")
        self.text, self.outputs, self.joined = "", [], text.strip("\n;")

    def _run(self, words: list[str]) -> None:
        if not words or (self.server and words[0] == "tee"):
            return
        if self.server:
            self.refuse(words[0], "a command after the server")
        count = next((number for number, word in enumerate(words) if not re.match(r"[A-Za-z_]\w*=", word)), len(words))
        assigned = dict(word.split("=", 1) for word in words[words[0] == "export" :] if re.match(r"[A-Za-z_]\w*=", word))
        if count == len(words) or (words[0] == "export" and len(assigned) == len(words) - 1):
            self.own |= assigned
            self._export({name: assigned[name] for name in assigned if words[0] == "export" or name in self.draft.variables})
        elif words[0] in _NEEDLESS:
            self.draft.note(self.source, _NEEDLESS[words[0]], " ".join(words))
        elif words[0] != "set" or not all(_OPTION.fullmatch(word) for word in words[1:]):
            self.server = words[count + (words[count] == "exec") :]
            if find_server(self.server)[0] != 0 or self.server[0].startswith("-"):
                self.refuse(" ".join(words[:3]))
            self._export(dict(word.split("=", 1) for word in words[:count]))

    def _export(self, variables: dict[str, str]) -> None:
        read_env(self.draft, [Fields({"name": name, "value": value}, f"{self.source} export") for name, value in variables.items()])
