"""Byte streams of valid HTTP/1.1, of nearly valid HTTP/1.1, and mutations of both."""

import random

PIECES = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b":",
    b" ",
    b"\t",
    b"0\r\n\r\n",
    b"content-length: 3\r\n",
    b"transfer-encoding: chunked\r\n",
    b"\xff",
    b"1" * 30,
)
METHODS = (b"GET", b"POST", b"POST", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"get", b"CONNECT", b"BREW")
TARGETS = (
    b"/health",
    b"/health",
    b"/tokenize",
    b"/v1/completions",
    b"/v1/models/",
    b"http://x/health",
    b"http://x",
    b"*",
    b"/a?b=%zz",
    b"//",
    b"x:1",
    b"/\xc3\xa9",
)
VERSIONS = (*[b"HTTP/1.1"] * 12, b"HTTP/1.0", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"http/1.1", b"HTTP/1.2")
EXTRAS = (
    b"x-a: b\r\n",
    b"X-Empty:\r\n",
    b"x-pad:   spaces  \r\n",
    b"connection: keep-alive\r\n",
    b"expect: 100-continue\r\n",
)
ODD = (
    b"connection: close\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"upgrade: websocket\r\n",
    b"x-fold: a\r\n b\r\n",
    b"x-fold: a\r\n\tcontent-length: 3\r\n",
    b"x-cr: a\rb\r\n",
    b"x-lf: a\nb: c\n",
    b"x space : a\r\n",
    b"content-length : 3\r\n",
    b": empty\r\n",
    b"no colon\r\n",
    b"x-null: a\0b\r\n",
    b"x-latin: \xe9\r\n",
    b"host: other\r\n",
)
LENGTHS = (b"+%d", b"-%d", b"0%d", b" %d ", b"%d,%d", b"%d, 7", b"0x%d", b"%d000000000000000000000", b"", b"%d\t", b"1%d")
CODINGS = (
    b"chunked",
    b"Chunked",
    b"identity",
    b"gzip, chunked",
    b"chunked, chunked",
    b"xchunked",
    b"chunked\r\ntransfer-encoding: chunked",
    b" chunked ",
    b"\x0bchunked",
)
EXTENSIONS = (b"", b"", b"", b";a=b", b";a", b' ;a="b\\"c"', b";a=b;c", b" ", b";\n", b";a\rb")
TRAILERS = (
    b"",
    b"",
    b"x-t: 1\r\n",
    b"x-t: 1\r\nx-u: 2\r\n",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"x-t: a\r\n b\r\n",
    b"x-t: a\n",
)


def stream(draw: random.Random) -> bytes:
    """Return one to five requests; one stream in three has mutations."""
    data = b"".join(_request(draw, odd=draw.random() < 0.2) for _ in range(draw.choice((1, 1, 2, 3, 5))))
    if draw.random() < 0.1:
        data = b"\r\n" * draw.randint(1, 3) + data
    if draw.random() < 0.33:
        for _ in range(draw.randint(1, 3)):
            data = _mutated(draw, data)
    return data


def splits(draw: random.Random, data: bytes) -> list[bytes]:
    """Split the bytes into one to six pieces; now and then byte by byte."""
    if draw.random() < 0.02:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 0, 1, 2, 5))))
    return [piece for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if (piece := data[begin:end])]


def _request(draw: random.Random, odd: bool) -> bytes:
    method = draw.choice(METHODS) if odd else draw.choice(METHODS[:7])
    target, version = (draw.choice(TARGETS), draw.choice(VERSIONS)) if odd else (draw.choice(TARGETS[:6]), VERSIONS[0])
    lines = [b"%b %b %b\r\n" % (method, target, version)]
    if not odd or draw.random() < 0.9:
        lines.append(b"Host: x\r\n")
    lines += draw.choices(EXTRAS, k=draw.choice((0, 0, 1, 2)))
    if odd:
        lines += draw.choices(ODD, k=draw.choice((0, 1, 1, 2)))
    body = draw.choice(
        (b"", b"{}", b'{"prompt": 1}', b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", bytes(draw.randrange(40)), b"a" * draw.randrange(300))
    )
    framing = draw.random()
    if framing < 0.3:
        body = b""
    elif framing < 0.6 or (framing < 0.63 and odd):
        given = b"%d" % len(body)
        if odd and draw.random() < 0.5:
            form = draw.choice(LENGTHS)
            given = form.replace(b"%d", given)
        lines.append(b"Content-Length: %b\r\n" % given)
        if odd and draw.random() < 0.3:
            lines.append(b"content-length: %d\r\n" % (len(body) + draw.choice((0, 0, 1))))
    else:
        coding = draw.choice(CODINGS) if odd and draw.random() < 0.5 else b"chunked"
        lines.append(b"Transfer-Encoding: %b\r\n" % coding)
        if odd and draw.random() < 0.2:
            lines.append(b"Content-Length: %d\r\n" % len(body))
        body = _chunked(draw, body, odd)
    draw.shuffle(tail := lines[1:])
    return b"".join([lines[0], *tail, b"\r\n", body])


def _chunked(draw: random.Random, body: bytes, odd: bool) -> bytes:
    parts, at = [], 0
    while at < len(body):
        size = draw.randint(1, len(body) - at)
        form = draw.choice((b"%x", b"%X", b"0%x", b"000000%x")) if draw.random() < 0.3 else b"%x"
        extension = draw.choice(EXTENSIONS) if draw.random() < (0.5 if odd else 0.1) else b""
        said = size + (draw.choice((0, 0, 0, 1, -1)) if odd else 0)
        parts.append(
            form % max(0, said) + extension + b"\r\n" + body[at : at + size] + (draw.choice((b"\r\n", b"\n", b"")) if odd else b"\r\n")
        )
        at += size
    trailers = draw.choice(TRAILERS) if draw.random() < (0.6 if odd else 0.2) else b""
    return b"".join(parts) + draw.choice((b"0", b"0", b"0", b"00", b"0;x=y")) + b"\r\n" + trailers + b"\r\n"


def _mutated(draw: random.Random, data: bytes) -> bytes:
    at, size = draw.randrange(len(data) + 1), draw.randint(1, 8)
    match draw.randrange(5):
        case 0:
            return data[:at] + draw.choice(PIECES) + data[at:]
        case 1:
            return data[:at] + data[at + size :]
        case 2:
            return data[:at] + data[at : at + size] * 2 + data[at + size :]
        case 3:
            return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
        case _:
            return data[:at] or data
