"""HTTP/1.1 on one connection: uvicorn's parser and replies, with an eye on the client while a request runs.

Five things differ. Reading is never paused behind a running request, because a paused connection would not show that the client left; so
what a client sends ahead of the reply (pipelining) is dropped, and the connection closes after that reply, which tells the client to send
it again (RFC 9112, 9.3.2). What is no HTTP, in a head or in the framing of a body, is answered in our shape. An offer
to upgrade to another protocol is ignored (RFC 9110, 7.8). The head of a request has a limit. A stream
may write without a task of its own (try_write).
"""

import uuid
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from radixserve.core import RequestError
from radixserve.server.early_answer import LINGER_S
from radixserve.server.replies import error_reply
from radixserve.server.stream import BODY_WRITER

MAX_HEAD_BYTES = 64 * 1024  # request line and headers


class HttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._head_bytes = 0  # received of a head that is not complete
        self._drops_input = False

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_answering() and not self.cycle.more_body:
            self._drop_input()
        if self._drops_input:
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        self._feed(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        if not self._drops_input:
            super().on_message_begin()
            self.scope["extensions"] = {BODY_WRITER: {"writer": self}}

    def on_headers_complete(self) -> None:
        if self._drops_input:
            return
        if self._is_answering():
            self._drop_input()
        elif len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head()
        elif not self.parser.should_upgrade():
            self._is_in_head = False
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._drops_input:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._drops_input or self.parser.should_upgrade():
            return
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def try_write(self, piece: bytes) -> bool:
        """stream.BodyWriter: what RequestResponseCycle.send() does with a piece of a chunked body, at once."""
        cycle = self.cycle
        if self.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(msg, 400, "invalid_request_error", "invalid_http"))

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _drop_input(self) -> None:
        self._drops_input = True
        self.cycle.keep_alive = False

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if self._is_answering() and not self.cycle.more_body:  # what comes behind a whole request takes nothing from it
                self._drop_input()
            elif not self._drops_input:
                self.send_400_response("Invalid HTTP request received.")

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """The parser takes what follows such a head for another protocol: read the head again, without the offer."""
        if self._drops_input:
            return
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response("CONNECT: this server is no proxy")
            return
        headers = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, b"".join(headers)) + rest)

    def _refuse_head(self) -> None:
        message = f"the request line and headers: expected at most {MAX_HEAD_BYTES} bytes"
        self._refuse(RequestError(message, 431, "invalid_request_error", "headers_too_large"))

    def _refuse(self, error: RequestError) -> None:
        """An answer from here, in the place of any application's; the rest of the connection is dropped."""
        self._drops_input = True
        if self._is_answering():  # its body cannot be read to its end
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        reply = error_reply(error, {"connection": "close", "x-request-id": f"req-{uuid.uuid4().hex}"})
        head = b"".join(b"%s: %s\r\n" % header for header in reply.raw_headers)
        self.transport.write(STATUS_LINE[error.http_status] + head + b"\r\n" + bytes(reply.body))
        if not self.transport.is_closing():
            # the client is told that nothing follows; it may still be sending (see early_answer.py)
            self.flow.resume_reading()
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
