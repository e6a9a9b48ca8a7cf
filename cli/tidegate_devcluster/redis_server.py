"""A real redis-server of its own, in memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.processes import Child, Lifeline, free_port

START_SECONDS = 10.0
LOOPBACK = "127.0.0.1"


class RedisServer:
    """redis-server on a free port, without persistence; a context manager, ready when entered.

    Attributes:
        port: The same across restarts.
    """

    port: int

    def __init__(
        self,
        root: Path,
        assets: Assets,
        *,
        addresses: Sequence[str] = (LOOPBACK,),
        users: Sequence[str] = (),
        lifeline: Lifeline | None = None,
    ) -> None:
        """Keeps configuration and log under `root`.

        Args:
            root: Folder of its own.
            assets: Gives the binary.
            addresses: It listens on these, the same port on each. The first is used by `url`.
            users: Redis ACL rules, each as after `user` in its configuration, for example
                "engine on >secret ~tidegate:* +@read". Where there are any, the user `default`
                is off unless it is among them; without, everyone may do everything.
            lifeline: Removes it when this process is killed; one of its own without.
        """
        self._root = root
        self._assets = assets
        self._addresses = tuple(addresses)
        self._users = tuple(users)
        self._given_lifeline = lifeline
        self._exits = ExitStack()

    def __enter__(self) -> RedisServer:
        with ExitStack() as exits:
            self._lifeline = self._given_lifeline or exits.enter_context(Lifeline())
            self.port = free_port(self._addresses[0])
            self._configuration = self._write_configuration()
            self._start()
            exits.callback(self.stop)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    @property
    def url(self) -> str:
        """URL on the first address, without credentials."""
        return self.url_for()

    def url_for(
        self,
        *,
        address: str | None = None,
        username: str | None = None,
        password: str | None = None,
        database: int = 0,
    ) -> str:
        """Returns the URL on one of the addresses, for a user if one is named."""
        user = ""
        if username is not None or password is not None:
            user = f"{quote(username or '', safe='')}:{quote(password or '', safe='')}@"
        return f"redis://{user}{address or self._addresses[0]}:{self.port}/{database}"

    @property
    def child(self) -> Child:
        """The running process."""
        return self._child

    def stop(self) -> None:
        """Kills it; what it held is gone."""
        self._child.stop()

    def restart(self) -> None:
        """Starts it anew and empty on the same port, after stopping it if it still runs."""
        self.stop()
        self._start()

    def _start(self) -> None:
        tool = self._assets.tool("redis-server")
        self._child = Child(
            "redis-server",
            [str(tool.path), str(self._configuration)],
            log=self._root / "redis-server.log",
            lifeline=self._lifeline,
            environment=tool.environment,
        )
        try:
            self._child.wait_until(self._answers, timeout_seconds=START_SECONDS)
        except BaseException:
            self._child.stop()
            raise

    def _write_configuration(self) -> Path:
        users = list(self._users)
        if users and not any(user.split()[:1] == ["default"] for user in users):
            users.append("default off")
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._root / "redis.conf"
        path.touch(mode=0o600)
        lines = [
            f"port {self.port}",
            f"bind {' '.join(self._addresses)}",
            f'dir "{self._root}"',
            'save ""',
            "appendonly no",
            # The pods' bridge is not loopback; it is reachable from this machine alone.
            "protected-mode no",
            *(f"user {user}" for user in users),
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self._addresses[0], self.port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                # With users, an answer is a refusal; either shows that it serves.
                return connection.recv(1) in {b"+", b"-"}
        except OSError:
            return False
