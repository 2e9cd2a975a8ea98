"""What a request gains of a step, and whether it ends by that.

The device ends a row by an end id or its length, and what it gives stops there; stop strings are the host's to find.
"""

from __future__ import annotations

from specgen.engine.request import EOS_NAME, NAN_TOKEN, Request


def take_tokens(
    request: Request, num_drafts: int, new: list[int], num_sampled: list[int], num_accepted: list[int]
) -> list[int]:
    """Appends what a step sampled, up to the row's end; the tokens appended.

    new: token ids of all times that the step ran. num_sampled, num_accepted: of each time, how many of them it gave,
    none behind the row's end, and how many of those were drafts. num_drafts: fed each time.
    """
    if request.stop_check is not None or NAN_TOKEN in new:
        return _take_one_by_one(request, num_drafts, new, num_sampled, num_accepted)
    if not new:
        return new
    # the device went on up to an end and no further
    assert request.end_ids.isdisjoint(new[:-1]), "the device went on behind an end"
    request.token_ids += new
    _check_stop(request, new[-1])
    num_left = request.max_tokens - request.num_output_tokens
    assert num_left >= 0, "the device went on behind a row's last token"
    if not num_drafts:
        request.stats.observe_plain(len(new))
    elif num_left > num_drafts:  # there was room for all drafts
        num_steps = len(num_sampled) - num_sampled.count(0)
        request.stats.observe_steps(num_drafts, num_accepted[:num_steps], len(new))
    else:
        num_left += len(new)
        for kept, accepted in zip(num_sampled, num_accepted, strict=True):
            if kept:
                _count(request, min(num_drafts, num_left - 1), accepted, kept)
                num_left -= kept
    return new


def _take_one_by_one(
    request: Request, num_drafts: int, new: list[int], num_sampled: list[int], num_accepted: list[int]
) -> list[int]:
    """The same, looking for the end behind every token: a stop string, or a token that could not be sampled."""
    kept: list[int] = []
    start = 0
    for num, accepted in zip(num_sampled, num_accepted, strict=True):
        if num and request.finish_reason is None:
            num_left = request.max_tokens - request.num_output_tokens
            taken = _append(request, new[start : start + num])
            _count(request, min(num_drafts, num_left - 1), min(accepted, len(taken)), len(taken))
            kept += taken
            start += num
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
