"""The command ``separate-demo``: serve the page until it is stopped, and keep nothing.

Everything that visitors bring or get lies in one temporary folder, which goes when the server ends. The
server itself fetches nothing: Gradio would take an address in place of a file, and such requests are refused.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from separator import __version__
from separator.errors import SeparatorError
from separator.script import Parser, number, whole
from separator.web_jobs import Limits

if TYPE_CHECKING:
    import gradio as gr

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_REQUEST_BYTES = 1 << 20  # of a request that is no upload


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = Parser(prog="separate-demo", description="Serve a web page that takes recordings apart.")
    parser.add_argument("--host", help="address to listen on, 0.0.0.0 for all (default: this machine only)")
    parser.add_argument("--port", type=_port, help="port to listen on (default: 7860 or the next free one)")
    parser.add_argument("--model", metavar="NAME|DIR", help="model to offer (default: all that are shipped)")
    limits = {
        "max_seconds": "longest recording taken",
        "max_megabytes": "largest file taken",
        "keep_minutes": "time after which files are deleted",
    }
    for name, text in limits.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_positive,
            default=getattr(Limits, name),
            metavar="N",
            help=f"{text} (default: %(default)g)",
        )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status."""
    arguments = build_parser().parse_args(argv)
    limits = Limits(arguments.max_seconds, arguments.max_megabytes, arguments.keep_minutes)
    stop = threading.Event()
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, lambda *_: stop.set())
    try:
        with tempfile.TemporaryDirectory(prefix="separate-demo-", ignore_cleanup_errors=True) as folder:
            os.environ["GRADIO_TEMP_DIR"] = folder
            page = start(limits, arguments.model, arguments.host, arguments.port)
            print(f"The page is at {page.local_url}; stop with Ctrl-C", flush=True)
            stop.wait()
            page.close(verbose=False)
    except SeparatorError as error:
        print(f"separate-demo: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def start(
    limits: Limits, model: str | Path | None = None, host: str | None = None, port: int | None = None
) -> "gr.Blocks":
    """Serve the page from threads of this process; ``close()`` what is returned to end it.

    Files go to the folder that the variable GRADIO_TEMP_DIR names.

    Raises:
        SeparatorError: Gradio is not installed, there is no such model, or the port is taken.
    """
    # nothing is told to anyone, and threads that wait for work do not spin beside the server's own
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from starlette.middleware import Middleware

        from separator.web import build_interface
        from separator.web_style import CSS, page_theme
    except ModuleNotFoundError as error:
        raise SeparatorError(
            f"the page needs {error.name}, which is not installed; install separator with its extra: demo"
        ) from error
    page = build_interface(limits, model)
    try:
        page.launch(
            server_name=host,
            server_port=port,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            enable_monitoring=False,
            run_history=False,
            footer_links=["api"],
            allowed_paths=[],
            max_file_size=int(1e6 * limits.max_megabytes),
            theme=page_theme(),
            css=CSS,
            app_kwargs={"middleware": [Middleware(RefuseAddresses)]},
        )
    except OSError as error:
        raise SeparatorError(f"{host=}, {port=} cannot be listened on ({error}); pass others") from error
    return page


class RefuseAddresses:
    """ASGI middleware that answers 403 to requests which would make the server fetch an address."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        path = scope.get("path", "")
        if "/file=http" in path.lower() or "/proxy=" in path:
            return await _refuse(send)
        if scope["type"] == "http" and scope["method"] == "POST" and not path.endswith("/upload"):
            body = await _read(receive)
            if body is None or _names_address(body):
                return await _refuse(send)
            receive = _replay(body, receive)
        await self.app(scope, receive, send)


async def _read(receive: Receive) -> bytes | None:
    """The body of a request, or None if it is too large."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_REQUEST_BYTES:
            return None
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the body once more, and then what comes after it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return again


def _names_address(body: bytes) -> bool:
    """Whether a file in a JSON body is said to lie elsewhere."""
    try:
        values = [json.loads(body)] if body else []
    except ValueError:
        return True
    while values:
        value = values.pop()
        if isinstance(value, dict):
            if str(value.get("path", "")).strip().lower().startswith(("http:", "https:")):
                return True
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
    return False


async def _refuse(send: Send) -> None:
    """Answer 403."""
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": b"this page takes uploaded files only"})


def _port(text: str) -> int:
    """Parse the number of a port."""
    return whole(text, 1, 65535)


def _positive(text: str) -> float:
    """Parse a number above 0."""
    value = number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
