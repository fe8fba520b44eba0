"""Bytes that are not quite a proper HTTP request, or not at all."""

import random

_BODY = b'{"prompt": "x", "max_tokens": 1}'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
_LENGTH = b"content-length: %d\r\n" % len(_BODY)
_WHOLE = _HEAD + _LENGTH + b"\r\n" + _BODY

FORMS: tuple[bytes, ...] = (
    b"",
    b"\r\n" * 50,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/0.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"get /health http/1.1\r\n\r\n",
    b"BREW /coffee HTTP/1.1\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /%00%ff%zz?a=%%% HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET //../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://elsewhere/health HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\nhello",
    b"HEAD /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nmore",
    b"GET /health HTTP/1.1\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n",
    b"GET /health HTTP/1.1\r\n: empty\r\n\r\n",
    b"GET /health HTTP/1.1\r\nx:\x00\r\n\r\n",
    b"GET /health HTTP/1.1\r\nx y: z\r\n\r\n",
    b"GET /health HTTP/1.1\r\nx: y\r\n folded\r\n\r\n",
    b"GET /health HTTP/1.1\nhost: x\n\n",
    _HEAD + b"content-length: -1\r\n\r\n",
    _HEAD + b"content-length: 99999999999999999999999\r\n\r\n",
    _HEAD + b"content-length: 0x10\r\n\r\n" + _BODY,
    _HEAD + b"content-length: 5, 5\r\n\r\n" + _BODY,
    _HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + _BODY,
    _HEAD + _LENGTH + b"transfer-encoding: chunked\r\n\r\n" + _BODY,
    _HEAD + b"transfer-encoding: gzip\r\n\r\n" + _BODY,
    _HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n" + _BODY,
    _HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff1\r\n" + _BODY,
    _HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nabc",
    _HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(_BODY) + _BODY + b"\r\n0\r\nx: y\r\n\r\n",
    _HEAD + b"content-encoding: gzip\r\n" + _LENGTH + b"\r\n" + _BODY,
    _HEAD + b"x-fairlead-prompt-tokens: 3\r\n" + _LENGTH + b"\r\n" + _BODY,
    _HEAD + b"x-fairlead-prompt-tokens: 99999999999\r\n" + _LENGTH + b"\r\n" + _BODY,
    _HEAD + b"x-request-id: \xff\xfe\r\n" + _LENGTH + b"\r\n" + _BODY,
    _HEAD + b"authorization: Bearer \xff\r\n" + _LENGTH + b"\r\n" + _BODY,
    _HEAD + b"expect: 100-continue\r\n" + _LENGTH + b"\r\n" + _BODY,
    _HEAD + b"expect: nonsense\r\n" + _LENGTH + b"\r\n" + _BODY,
    _HEAD + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
    _HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(500)) + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    _WHOLE * 5,
    _WHOLE + b"garbage\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 200,
    _WHOLE.replace(b"HTTP/1.1", b"HTTP/1.0"),
    _WHOLE.replace(b"x\r\n", b"\r\n", 1),
    _WHOLE[:-5],
)


def raw(draw: random.Random) -> bytes:
    """Return one of the forms, or one with a few bytes changed."""
    data = bytearray(draw.choice(FORMS))
    if draw.random() < 0.5 and data:
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randint(1, 9)]
                case _:
                    data[at:at] = draw.randbytes(draw.randint(1, 9))
            if not data:
                break
    return bytes(data)
