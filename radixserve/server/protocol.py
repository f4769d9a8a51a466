"""uvicorn's HTTP/1.1 protocol, with our error shape for what is no HTTP: it never reaches the app and its middleware."""

import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixserve.core import RequestError
from radixserve.server.replies import error_reply


class HttpProtocol(HttpToolsProtocol):
    def send_400_response(self, msg: str) -> None:
        reply = error_reply(RequestError(msg, 400, "invalid_request_error", "invalid_http"), {"x-request-id": f"req-{uuid.uuid4().hex}"})
        headers = b"".join(name + b": " + value + b"\r\n" for name, value in reply.raw_headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + headers + b"connection: close\r\n\r\n" + bytes(reply.body))
        self.transport.close()
