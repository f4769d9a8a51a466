"""A server that dies in its work: `python -m tests.support.dying_server PORT NUM_ANSWERS` gives so many answers, then ends at the next."""

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from tests.support.null_server import completion_stream


class _Handler(BaseHTTPRequestHandler):
    num_left = int(sys.argv[2])

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if _Handler.num_left == 0:
            print("out of memory, say", flush=True)
            os._exit(3)
        _Handler.num_left -= 1
        self.wfile.write(completion_stream(2))

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
