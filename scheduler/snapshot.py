"""Requests as plain data and back, for a scheduler that continues elsewhere. Knows fields: no KV, no rows.

Tokens that only the device had seen are left out: they are sampled once more, and a request whose noise depends on its
seed and the position alone gets the same ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.roster import Roster

VERSION = 2
_AS_THEY_ARE = (
    "request_id",
    "prompt_ids",
    "max_new_tokens",
    "priority",
    "arrival_time",
    "deadline",
    "cache_salt",
    "skip_prefix_cache",
    "is_quiet",
    "output_ids",
    "num_told",
    "num_yields",
    "num_cached_tokens",
    "order",
)

type Encode = Callable[[Any], Any]


def unchanged(params: Any) -> Any:
    """Takes params to be plain data already."""
    return params


def plain_requests(roster: Roster, encode_params: Encode) -> list[dict[str, Any]]:
    """Gives all living requests in the order of their arrival, those held back with the name of their leader."""
    leaders = {name: group.leader.request_id for group in roster.siblings.groups() for name in group.held}
    requests = sorted(roster.living.values(), key=lambda request: request.order)
    return [_to_plain(r, encode_params) | {"leader": leaders.get(r.request_id)} for r in requests]


def place_requests(
    plain: Sequence[dict[str, Any]], roster: Roster, decode_params: Encode, check: Callable[[Request], None]
) -> list[Request]:
    """Puts the requests of `plain_requests` into an empty roster, waiting or paused."""
    requests = [_from_plain(one, decode_params) for one in plain]
    families: dict[str, list[Request]] = {}
    for one, request in zip(plain, requests, strict=True):
        check(request)
        families.setdefault(one["leader"] or request.request_id, []).append(request)
    for family in families.values():
        roster.place(family)
    for one, request in zip(plain, requests, strict=True):
        if one["is_paused"]:
            roster.pause(request)
    return requests


def _to_plain(request: Request, encode_params: Encode) -> dict[str, Any]:
    """Gives what a request needs to go on, in values that json can write."""
    ran = request.status is RequestStatus.RUNNING
    plain = {name: getattr(request, name) for name in _AS_THEY_ARE}
    plain |= {"prompt_ids": list(request.prompt_ids), "output_ids": list(request.output_ids)}
    return plain | {
        "eos_token_ids": sorted(request.eos_token_ids),
        "stop_token_ids": sorted(request.stop_token_ids),
        "kv_key": list(request.kv_key),
        "params": encode_params(request.params),
        "is_paused": request.status is RequestStatus.PAUSED,
        "num_preemptions": request.num_preemptions + ran,
        "num_to_recompute": request.num_to_recompute + request.num_computed,
    }


def _from_plain(plain: dict[str, Any], decode_params: Encode) -> Request:
    """Makes the waiting request that `_to_plain` described."""
    return Request(
        **{name: plain[name] for name in _AS_THEY_ARE},
        eos_token_ids=frozenset(plain["eos_token_ids"]),
        stop_token_ids=frozenset(plain["stop_token_ids"]),
        kv_key=tuple(plain["kv_key"]),
        params=decode_params(plain["params"]),
        num_preemptions=plain["num_preemptions"],
        num_to_recompute=plain["num_to_recompute"],
    )
