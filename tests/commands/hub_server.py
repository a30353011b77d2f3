"""A stand-in of the hub: a server on this machine that answers what `huggingface_hub` asks to make a repository and to
upload a folder, and keeps the files. Large files go the way of LFS, as on the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_of_this_test"


class Hub:
    """What the server knows. repositories: by name, whether they are private, and the commits' messages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repositories: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.url = ""

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and content of the answer to a POST."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
            self.repositories[name] = {"visibility": asked.get("visibility"), "commits": []}
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            actions = [
                {**one, "actions": {"upload": {"href": f"{self.url}/objects/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": actions}
        owner, name, what = path.removeprefix("/api/models/").split("/")[:3]
        if f"{owner}/{name}" not in self.repositories:
            return 404, {"error": "Repository not found"}
        if what == "preupload":
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": modes}
        assert what == "commit", path
        return 200, self._commit(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.repositories[name]["commits"].append(value["summary"])
                continue
            content = base64.b64decode(value["content"]) if line["key"] == "file" else self.objects[value["oid"]]
            target = self.folder / name / value["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return {"commitUrl": f"{self.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}


@contextmanager
def hub_server(folder: Path) -> Iterator[Hub]:
    """A hub that keeps repositories in ``folder``."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                self._reply(401, {"error": "Invalid credentials in Authorization header"})
                return
            self._reply(*hub.answer(self.path.partition("?")[0], body))

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            oid = self.path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            hub.objects[oid] = body
            self._reply(200, {})

        def _reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
