"""Client of an etcd cluster over its HTTP gateway (etcd 3.4 or newer), which needs no package.

Keys, requests and revisions are those of https://etcd.io/docs/v3.4/learning/api/. A cluster that has lost its majority
does not answer; a request then fails after `TIMEOUT` seconds for each address.
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Sequence
from typing import Any

from jaxtrain.distributed.store_types import Compare, Put, StoredValue, StoreError
from jaxtrain.errors import UserError

TIMEOUT = 1.0  # seconds that one member of the cluster may take to answer
SCHEME = "etcd://"


def open_etcd(url: str) -> EtcdStore:
    """Opens the cluster of a URL `etcd://HOST:PORT,HOST:PORT,...`, without connecting. Raises UserError."""
    addresses = url.removeprefix(SCHEME).split(",")
    is_valid = all(host and port.isdecimal() for host, _, port in (address.rpartition(":") for address in addresses))
    if not url.startswith(SCHEME) or not is_valid or "@" in url:
        raise UserError("launch: --store: expected etcd://HOST:PORT,HOST:PORT,... without a password")
    return EtcdStore(addresses)


class EtcdStore:
    """Keys of an etcd cluster. Safe to use from several threads.

    Args:
        addresses: HOST:PORT of members; a request goes to the one that answered last, then to the others.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)

    def get(self, key: str) -> StoredValue | None:
        """Returns the value of a key, or None. The cluster's majority confirms it."""
        values = self._call("kv/range", key=_encode(key)).get("kvs", [])
        return _value(values[0]) if values else None

    def transact(self, compare: Sequence[Compare], put: Sequence[Put]) -> int | None:
        """Writes keys at once if all comparisons hold. Returns the store's revision after it, None if one does not."""
        answer = self._call(
            "kv/txn",
            compare=[
                {
                    "key": _encode(item.key), "result": "EQUAL", "target": "CREATE" if item.is_created else "MOD",
                    "create_revision" if item.is_created else "mod_revision": str(item.revision),
                }
                for item in compare
            ],
            success=[
                {"request_put": {"key": _encode(item.key), "value": _encode(item.value), "lease": str(item.lease)}}
                for item in put
            ],
        )  # fmt: skip
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    def grant_lease(self, seconds: float) -> int:
        """Returns a new lease: keys that are put with it are deleted when it is not renewed for `seconds`."""
        return int(self._call("lease/grant", TTL=str(max(1, round(seconds))))["ID"])

    def renew_lease(self, lease: int) -> bool:
        """Renews a lease. Returns False if it has expired."""
        answer = self._call("lease/keepalive", ID=str(lease))
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def revoke_lease(self, lease: int) -> None:
        """Ends a lease, which deletes its keys."""
        self._call("kv/lease/revoke", ID=str(lease))

    def _call(self, method: str, **request: Any) -> dict[str, Any]:
        problems = []
        for address in list(self._addresses):
            try:
                answer = _post(address, method, request)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problems.append(f"{address}: {getattr(error, 'strerror', None) or error or type(error).__name__}")
                continue
            if self._addresses[0] != address:
                self._addresses = [address, *(other for other in self._addresses if other != address)]
            return answer
        raise StoreError(f"etcd at {problems[0]}" + (", nor do the others" if len(problems) > 1 else ""))


def _post(address: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT)
    try:
        connection.request("POST", f"/v3/{method}", json.dumps(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.readline() if method == "lease/keepalive" else response.read()  # the former is a stream
        answer = json.loads(text)
    finally:
        connection.close()
    if not isinstance(answer, dict) or "error" in answer:
        problem = answer.get("error") if isinstance(answer, dict) else answer
        raise ValueError(str(problem.get("message", problem) if isinstance(problem, dict) else problem))
    return answer


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode()


def _value(item: dict[str, Any]) -> StoredValue:
    return StoredValue(_decode(item.get("value", "")), int(item["create_revision"]), int(item["mod_revision"]))
