"""Read a multipart form with one file and short other fields, as it arrives.

FastAPI's own forms store parts of any size and number before a route sees them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from api.asgi.uploads import announced_length, read_pieces
from api.errors import ApiError

FILE_FIELD = "file"
MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
MAX_HEADERS = 8
Write = Callable[[bytes], object]


@dataclass(slots=True)
class Form:
    """Hold the fields beside the file."""

    fields: dict[str, str] = field(default_factory=dict)
    # The file's name; None: there was no file.
    filename: str | None = None


def check_form_headers(request: Request) -> int:
    """Return the announced length of the body in bytes.

    Raises:
        ApiError: 415, not a multipart form; 411, no length is announced.
    """
    kind, _ = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data":
        raise ApiError(415, "content-type must be multipart/form-data", code="unsupported_media_type")
    return announced_length(request)


async def receive_form(request: Request, write: Write) -> Form:
    """Read the whole form; `write` is called with the file's bytes, in a worker thread.

    Raises:
        ApiError: 400, the form is malformed, has too many parts, a field that is too long, or a second file.
        Exception: raised by `write`.
    """
    _, options = parse_options_header(request.headers.get("content-type"))
    reader = _Reader(options.get(b"boundary", b""), write)
    await read_pieces(request, reader.feed)
    return reader.end()


class _Reader:
    """Handle the parser's callbacks, for one thread at a time."""

    def __init__(self, boundary: bytes, write: Write) -> None:
        self._form = Form()
        self._write = write
        self._num_parts = 0
        self._is_whole = False
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._name = ""
        self._value: bytearray | None = None
        if not boundary:
            raise _malformed("its content-type names no boundary")
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
                max_header_count=MAX_HEADERS,
            )
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from None

    def end(self) -> Form:
        if not self._is_whole:
            raise _malformed("it ends too early")
        return self._form

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._disposition = b""

    def _end_header(self) -> None:
        if self._header_name.strip().lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _malformed("a part has no name")
        self._name = _text(options[b"name"])
        self._value = bytearray()
        if self._name == FILE_FIELD:
            if self._form.filename is not None:
                raise _malformed(f"it has two parts named {FILE_FIELD!r}")
            # Some clients send bytes as a part without a filename.
            self._form.filename = _text(options.get(b"filename", b"")) or FILE_FIELD
            self._value = None
        elif b"filename" in options:
            raise _malformed(f"only the part named {FILE_FIELD!r} may be a file")
        elif self._name in self._form.fields:
            raise _malformed("it has two parts of the same name")

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self._write(data[start:end])
            return
        if len(self._value) + end - start > MAX_FIELD_BYTES:
            raise _malformed(f"a field has more than {MAX_FIELD_BYTES} bytes")
        self._value += data[start:end]

    def _end_part(self) -> None:
        if self._value is not None:
            self._form.fields[self._name] = _text(bytes(self._value))

    def _end(self) -> None:
        self._is_whole = True


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise _malformed("a name or a field is not UTF-8") from None


def _malformed(why: str) -> ApiError:
    return ApiError(400, f"the form is malformed: {why}", code="invalid_form")
