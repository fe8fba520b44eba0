"""Random request bodies after the OpenAPI document: some valid, some at or beyond the edge of a bound, some nonsense."""

import json
import random
from typing import Any

from fairlead_common.protocols.paths import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, INVOCATIONS, MESSAGES, RERANKS, RESPONSES, SCORES

GENERATING = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
HI = [{"role": "user", "content": "hi"}]
CHOICES = ("tool", "any", "auto", "none", "allowed_tools", "")
TEXTS = (
    *("", " ", "hello", "naïve 🎉 日本語", "\u0000\u0001", "\ud800", "a" * 3000, "{{ messages }}"),
    *("</s><|im_end|>", "-1", "null", "%n%s", "\u202e"),
)
NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 1e-320, 2**31, 2**32, 2**63, -(2**63) - 1, 10**40, 127, 1024, 4096)
ROLES = ("user", "assistant", "system", "tool", "developer", "function", "", "root", 5, None)
REGEXES = ("[a-z]+", "(a+)+$", "a{1,100000}", "(", "\\d{3}", "(?=x)", "[^\\x00-\\xff]", "(((a|b)*c)*d)*", "", "\\p{L}+")
GRAMMARS = ('start: "a" | "b"', "start: start start", "start: ", 'root ::= "x" root | "y"', "start: /(/", "start: a\na: b\nb: a")
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"enum": ["x", "y", 1, None]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}},
    {"type": "string", "pattern": "(a+)+$", "maxLength": 4},
    {"type": "string", "minLength": 10**9},
    {"$ref": "http://nowhere.invalid/schema"},
    {"$ref": "#"},
    {"type": "no-such-type"},
    {"not": {"type": "string"}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"properties": {f"k{n}": {"type": "string", "enum": [f"v{n}", "w"]} for n in range(200)}},
    True,
    False,
    {},
)


class Bodies:
    """Draws bodies. The same seed draws the same bodies."""

    def __init__(self, document: dict[str, Any], draw: random.Random) -> None:
        self._schemas = document["components"]["schemas"]
        self._draw = draw
        self.operations = [
            (path, self._schemas[said["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]])
            for path, said in document["paths"].items()
            if "requestBody" in said.get("post", {}) and "lora" not in path and path != INVOCATIONS
        ]

    def operation(self) -> tuple[str, bytes]:
        """Return a path and a body for it. Three in five are for the endpoints that generate."""
        generating = [each for each in self.operations if each[0] in GENERATING]
        path, schema = self._draw.choice(generating if self._draw.random() < 0.6 else self.operations)
        return path, self.encoded(self.body(path, schema))

    def body(self, path: str, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a body with few fields: one with everything in it fails at its first error, and the others are not reached."""
        draw = self._draw
        body: dict[str, Any] = {}
        if draw.random() < 0.95:
            body |= self._prompt(path)
        if path in (CHAT, RESPONSES, MESSAGES) and draw.random() < 0.15:
            body |= self._forced(path)
        names = sorted(schema["properties"])
        for name in draw.sample(names, min(len(names), draw.choice((0, 1, 1, 1, 2, 2, 3, 5, 8)))):
            body[name] = self.field(path, name, schema["properties"][name])
        if draw.random() < 0.03:
            body[draw.choice(("no_such_field", "", "prompt ", "__proto__"))] = self.nonsense()
        return self._short(body)

    def field(self, path: str, name: str, node: dict[str, Any]) -> Any:
        draw = self._draw
        if draw.random() < 0.15:
            return self.nonsense()
        match name:
            case "messages":
                return self.turns() if path in (MESSAGES, COUNT_TOKENS) else self.messages()
            case "input" if path == RESPONSES:
                return self.items()
            case "tools":
                return [self.tool(path) for _ in range(draw.choice((0, 1, 2, 20)))]
            case "tool_choice":
                named: tuple[Any, ...] = ({"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"})
                return draw.choice((*("none", "auto", "required", "any", ""), *named, *({"type": kind, "name": "f"} for kind in CHOICES)))
            case "reasoning_effort":
                return draw.choice(("none", "low", "high", "", "x" * 33))
            case "reasoning" | "thinking" | "output_config" | "text":
                return self.shape(name)
            case "system":
                return draw.choice((*TEXTS, [{"type": "text", "text": draw.choice(TEXTS)}], [{"type": "image"}]))
            case "response_format":
                kind = draw.choice(("text", "json_object", "json_schema", "structural_tag", "grammar", None))
                return {"type": kind, "json_schema": {"name": "a", "schema": draw.choice(SCHEMAS)}}
            case "structured_outputs":
                kind = draw.choice(("json", "regex", "choice", "grammar", "json_object", "structural_tag"))
                return {kind: self._form(kind)} | ({"whitespace_pattern": draw.choice(REGEXES)} if draw.random() < 0.2 else {})
            case "guided_json":
                return draw.choice((*SCHEMAS, *map(json.dumps, SCHEMAS), "{"))
            case "guided_regex" | "guided_whitespace_pattern":
                return draw.choice(REGEXES)
            case "guided_grammar":
                return draw.choice(GRAMMARS)
            case "logit_bias":
                tokens, values = (0, 5, 1023, 1024, -1, "a", "05", 2**40), (-100, 100, 0, 101, 1e300)
                return {str(draw.choice(tokens)): draw.choice(values) for _ in range(3)}
        return self.value(node)

    def value(self, node: dict[str, Any], depth: int = 0) -> Any:
        """Return a value for a schema: valid, or almost valid."""
        draw = self._draw
        if "$ref" in node:
            node = self._schemas[node["$ref"].rpartition("/")[2]]
        if "enum" in node:
            return draw.choice(node["enum"])
        if "const" in node:
            return node["const"]
        if "anyOf" in node:
            return self.value(draw.choice(node["anyOf"]), depth)
        kind = node.get("type")
        if isinstance(kind, list):
            kind = draw.choice(kind)
        match kind:
            case "null":
                return None
            case "boolean":
                return draw.random() < 0.5
            case "integer" | "number":
                low, high = node.get("minimum", node.get("exclusiveMinimum", -2)), node.get("maximum", 4096)
                edges = [low, high, low - 1, high + 1, draw.uniform(low, high)]
                between = draw.randint(int(low), min(int(high), int(low) + 8)) if kind == "integer" else draw.uniform(low, high)
                return between if draw.random() < 0.6 else draw.choice(edges)
            case "string":
                return draw.choice(("a", "word", *TEXTS))
            case "array":
                most = node.get("maxItems", 8)
                length = draw.choice((0, 1, 1, 2, 3, most, most + 1)) if most < 2000 else draw.choice((0, 1, 2))
                return [self.value(node.get("items", {}), depth + 1) for _ in range(min(length, 1100))]
            case "object" if depth < 3:
                inner = node.get("properties") or {"a": {}, "5": {}}
                return {name: self.value(each, depth + 1) for name, each in inner.items() if draw.random() < 0.6}
        return self.nonsense(depth)

    def nonsense(self, depth: int = 0) -> Any:
        draw = self._draw
        kind = draw.random()
        if kind < 0.12:
            return None
        if kind < 0.25:
            return draw.random() < 0.5
        if kind < 0.5:
            return draw.choice((*NUMBERS, float("nan"), float("inf")))
        if kind < 0.75 or depth > 2:
            return draw.choice(TEXTS)
        if kind < 0.77:
            deep: Any = []
            for _ in range(draw.choice((50, 200, 450))):
                deep = [deep] if draw.random() < 0.9 else {"a": deep}
            return deep
        if kind < 0.88:
            return [self.nonsense(depth + 1) for _ in range(draw.randint(0, 4))]
        return {draw.choice(("a", "type", "", "text", "$ref")): self.nonsense(depth + 1) for _ in range(draw.randint(0, 3))}

    def shape(self, name: str) -> dict[str, Any]:
        """Return one of the objects in which the protocols group the options of an answer."""
        draw = self._draw
        schema = {"format": {"type": draw.choice(("json_schema", "text", "json_object", "")), "name": "a", "schema": draw.choice(SCHEMAS)}}
        effort = {"effort": draw.choice(("none", "low", "high", 5, ""))}
        kind = {"type": draw.choice(("enabled", "disabled", "adaptive", "")), "budget_tokens": draw.choice((1024, 0, -1, "a"))}
        whole = {"reasoning": effort, "thinking": kind, "output_config": schema | effort, "text": schema}[name]
        return {part: value if draw.random() < 0.9 else self.nonsense() for part, value in whole.items() if draw.random() < 0.8}

    def items(self) -> Any:
        """Return the input of a response."""
        return self._draw.choice(TEXTS) if self._draw.random() < 0.2 else [self.item() for _ in range(self._draw.choice((0, 1, 2, 3, 40)))]

    def item(self) -> Any:
        draw = self._draw
        text = {"type": draw.choice(("input_text", "output_text", "refusal", "input_image")), "text": draw.choice(TEXTS)}
        forms: tuple[Any, ...] = (
            self.message(),
            {"type": "message", "role": draw.choice(ROLES), "content": [text, text]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": draw.choice(("{}", "{", "5", 5))},
            {"type": "function_call_output", "call_id": draw.choice(("c", "d", 5)), "output": draw.choice((*TEXTS, [text]))},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": draw.choice(TEXTS)}]},
            {"type": draw.choice(("item_reference", "web_search_call", 5, None)), "id": "x"},
            self.nonsense(),
        )
        return draw.choice(forms)

    def turns(self) -> list[Any]:
        """Return messages of the protocol with content blocks."""
        return [self.turn() for _ in range(self._draw.choice((0, 1, 2, 3, 40)))]

    def turn(self) -> Any:
        draw = self._draw
        blocks: tuple[Any, ...] = (
            {"type": "text", "text": draw.choice((*TEXTS, 5))},
            {"type": "thinking", "thinking": draw.choice(TEXTS), "signature": ""},
            {"type": "tool_use", "id": "c", "name": "f", "input": draw.choice(({}, {"a": 1}, "{}", None))},
            {"type": "tool_result", "tool_use_id": draw.choice(("c", 5)), "content": draw.choice(TEXTS), "is_error": draw.random() < 0.3},
            {"type": draw.choice(("image", "document", 5, None))},
            self.nonsense(),
        )
        content = draw.choice((draw.choice(TEXTS), [draw.choice(blocks) for _ in range(draw.randint(0, 3))], self.nonsense()))
        return {"role": draw.choice(ROLES[:2] if draw.random() < 0.8 else ROLES), "content": content}

    def messages(self) -> list[Any]:
        return [self.message() for _ in range(self._draw.choice((0, 1, 1, 2, 3, 40)))]

    def message(self) -> Any:
        draw = self._draw
        if draw.random() < 0.05:
            return self.nonsense()
        message: dict[str, Any] = {"role": draw.choice(ROLES[:3] if draw.random() < 0.8 else ROLES)}
        content = draw.random()
        if content < 0.7:
            message["content"] = draw.choice(TEXTS)
        elif content < 0.85:
            message["content"] = [{"type": draw.choice(("text", "image_url", "input_audio", 1)), "text": draw.choice((*TEXTS, 5))}]
        elif content < 0.95:
            message["content"] = self.nonsense()
        if draw.random() < 0.1:
            arguments = draw.choice(("{}", "{", '{"a":1}', {"a": 1}, 5, None))
            message["tool_calls"] = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        if draw.random() < 0.1:
            message[draw.choice(("name", "refusal", "audio", "reasoning_content", "tool_call_id"))] = self.nonsense()
        return message

    def tool(self, path: str) -> Any:
        draw = self._draw
        function = {"name": draw.choice(("f", "", "a b", 5, "g" * 200)), "parameters": draw.choice(SCHEMAS)}
        flat = {"type": draw.choice(("function", "custom", None)), **function, "input_schema": draw.choice(SCHEMAS)}
        right = {"type": "function", "function": function} if path == CHAT else flat
        return draw.choice((right, right, flat, {"type": "function"}, self.nonsense()))

    def _forced(self, path: str) -> dict[str, Any]:
        """Return a forced tool call, valid most of the time; its arguments may be endless."""
        draw = self._draw
        name, schema = "f", draw.choice((*SCHEMAS[:2], *SCHEMAS))
        function = {"name": name, "parameters": schema, "strict": draw.random() < 0.5}
        if path == MESSAGES:
            choice = draw.choice(({"type": "any"}, {"type": "tool", "name": name}, {"type": "auto"}, {"type": "none"}))
            return {"tools": [{"name": name, "input_schema": schema}], "tool_choice": choice, "max_tokens": 40}
        named = {"type": "function", "function": {"name": name}} if path == CHAT else {"type": "function", "name": name}
        tool = {"type": "function", "function": function} if path == CHAT else {"type": "function", **function}
        most = "max_tokens" if path == CHAT else "max_output_tokens"
        return {"tools": [tool], "tool_choice": draw.choice(("required", named, "auto", "none")), most: draw.choice((3, 40))}

    def encoded(self, body: Any) -> bytes:
        """Encode as JSON, now and then corrupted."""
        draw = self._draw
        data = json.dumps(body, ensure_ascii=True).encode()
        kind = draw.random()
        if kind < 0.9:
            return data
        if kind < 0.92:
            return data[: draw.randint(0, len(data))]
        if kind < 0.94:
            at = draw.randint(0, len(data))
            return data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at:]
        if kind < 0.96:
            return data.replace(b'"', draw.choice((b"'", b"", b'""')), draw.randint(1, 4))
        if kind < 0.98:
            others = (b"", b"null", b"[]", b'""', b"5", b"[" * 5000, b'{"a":' * 5000, b"\xef\xbb\xbf" + data, b"\xff\xfe", data * 2)
            return draw.choice(others)
        return data[:-1] + b', "prompt": "again", "messages": [{"role": "user", "content": "again"}]}'

    def _prompt(self, path: str) -> dict[str, Any]:
        draw = self._draw
        if path == "/detokenize":
            return {"tokens": [draw.choice((0, 5, 7, 1023, 1024, 2**32 - 1, -1)) for _ in range(draw.randint(0, 5))]}
        own = draw.random() < 0.3
        if path in (MESSAGES, COUNT_TOKENS):
            return {"messages": self.turns() if own else HI, "max_tokens": draw.randint(1, 6)}
        if path == CHAT or (path == "/tokenize" and draw.random() < 0.5):
            return {"messages": self.messages() if own else HI}
        if path == RESPONSES:
            return {"input": self.items() if own else draw.choice(("hi", HI)), "max_output_tokens": draw.randint(1, 6)}
        texts: Any = draw.choice(
            (["a", "b"], [*TEXTS], [], ["a"] * 300, "a", [{"text": "a"}, {"text": ""}], [{}]) if own else ("a", ["a", "b"])
        )
        if path in SCORES:
            return {"text_1": "a", "text_2": texts}
        if path in RERANKS:
            return {"query": draw.choice(("a", *TEXTS)), "documents": texts if own else ["a", "b"]}
        if path == EMBEDDINGS:
            return {
                "input": draw.choice((texts, [5, 6], [[5], [6, 7]], [999999], [-1], "word " * 5000) if own else ("a", ["a", "b"], [5, 6]))
            }
        usual: tuple[Any, ...] = ("hello there", "x", [5, 6, 7])
        others = (["a", "b"], [[5], [6, 7]], *TEXTS, [999999], [-1], ["a", 1], [], [[]], "word " * 300)
        return {"prompt": draw.choice(others if draw.random() < 0.4 else usual)}

    def _form(self, kind: str) -> Any:
        forms: dict[str, tuple[Any, ...]] = {
            "json": SCHEMAS,
            "regex": REGEXES,
            "grammar": GRAMMARS,
            "choice": (["a", "b"], [], [""], ["x"] * 2000, [5]),
            "json_object": (True, False),
            "structural_tag": ({}, {"type": "structural_tag", "format": {"type": "any_text"}}, {"structures": []}),
        }
        return self._draw.choice(forms[kind])

    def _short(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make valid requests end soon: long answers add no coverage and take time."""
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            most = body.get(name)
            if (most is None and name == "max_tokens") or (isinstance(most, int) and most > 40 and self._draw.random() < 0.95):
                body[name] = self._draw.randint(1, 6)
        for name in ("n", "best_of"):
            if isinstance(body.get(name), int) and body[name] > 4 and self._draw.random() < 0.8:
                body[name] = self._draw.randint(1, 3)
        return body
