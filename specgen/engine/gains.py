"""What a request gains of a step, and whether it ends by that.

The device ends a row by an end id or its length, and what it gives stops there; stop strings are the host's to find.
"""

from __future__ import annotations

from itertools import chain

from specgen.engine.request import EOS_NAME, NAN_TOKEN, Request


def take_tokens(request: Request, num_drafts: int, sampled: list[list[int]], num_accepted: list[int]) -> list[int]:
    """Appends what a step sampled, up to the row's end; the tokens appended.

    sampled, num_accepted: token ids, and how many of them were drafts, of each time that the step ran; none behind the
    row's end. num_drafts: fed each time.
    """
    new = sampled[0] if len(sampled) == 1 else list(chain.from_iterable(sampled))
    if request.stop_check is not None or NAN_TOKEN in new:
        return _take_one_by_one(request, num_drafts, sampled, num_accepted)
    if not new:
        return new
    # the device went on up to an end and no further
    assert request.end_ids.isdisjoint(new[:-1]), "the device went on behind an end"
    request.token_ids += new
    _check_stop(request, new[-1])
    assert request.num_output_tokens <= request.max_tokens, "the device went on behind a row's last token"
    if not num_drafts:
        request.stats.observe_plain(len(new))
        return new
    num_left = request.max_tokens - request.num_output_tokens + len(new)
    for token_ids, accepted in zip(sampled, num_accepted, strict=True):
        if token_ids:
            _count(request, min(num_drafts, num_left - 1), accepted, len(token_ids))
            num_left -= len(token_ids)
    return new


def _take_one_by_one(request: Request, num_drafts: int, sampled: list[list[int]], num_accepted: list[int]) -> list[int]:
    """The same, looking for the end behind every token: a stop string, or a token that could not be sampled."""
    kept: list[int] = []
    for token_ids, accepted in zip(sampled, num_accepted, strict=True):
        if token_ids and request.finish_reason is None:
            num_left = request.max_tokens - request.num_output_tokens
            new = _append(request, token_ids)
            _count(request, min(num_drafts, num_left - 1), min(accepted, len(new)), len(new))
            kept += new
    return kept


def _append(request: Request, sampled: list[int]) -> list[int]:
    for i, token in enumerate(sampled):
        if token == NAN_TOKEN:
            request.finish_reason = "error"
            return sampled[:i]
        request.token_ids.append(token)
        _check_stop(request, token)
        if request.finish_reason is not None:
            # only strings are the host's alone to find
            assert i + 1 == len(sampled) or request.stop_at is not None, "the device went on behind an end"
            return sampled[: i + 1]
    return sampled


def _check_stop(request: Request, token: int) -> None:
    if token in request.end_ids:
        request.finish_reason, request.stop = "stop", EOS_NAME if token in request.eos_ids else token
    elif request.stop_check is not None and (found := request.stop_check.push(token)) is not None:
        request.finish_reason = "stop"
        request.stop, request.stop_at = found
    elif request.num_output_tokens >= request.max_tokens:
        request.finish_reason = "length"


def _count(request: Request, num_drafts: int, num_accepted: int, num_kept: int) -> None:
    """Counts a step by the drafts that there was room for; with more fed to it, a row's counts are the same."""
    request.stats.observe(num_drafts, min(num_accepted, num_drafts), num_kept)
