"""Judges whether a canary is worse than the old revision. Returns the reason for people, or an empty string."""

from fairlead_common.canary_split import Side, SplitReport
from fairlead_operator.api.rollout import Canary

NOISE = 0.01  # seconds: a smaller difference in time to first token is ignored
QUANTILES = (0.5, 0.9)


def compare_error_rates(report: SplitReport, canary_spec: Canary) -> str:
    """Compare the shares of failed requests. A failure on both sides, such as a flood of invalid requests, is not the canary's."""
    canary, stable = report.canary, report.stable
    if canary.error_rate <= stable.error_rate + canary_spec.allowed_error_rate_increase:
        return ""
    allowed = f"at most {_percent(canary_spec.allowed_error_rate_increase)} more may (spec.rollout.canary.maxErrorRateIncrease)"
    return f"{_errors(canary)} failed, of the old revision {_errors(stable)}; {allowed}"


def compare_ttft(report: SplitReport, canary_spec: Canary) -> str:
    """Compare the times to first token, where both were measured."""
    canary, stable = report.canary.ttft, report.stable.ttft
    if not canary.count or not stable.count:
        return ""
    for share in QUANTILES:
        slow, usual = canary.quantile(share), stable.quantile(share)
        if slow > canary_spec.allowed_ttft_ratio * usual and slow - usual > NOISE:
            return (
                f"its p{100 * share:.0f} time to first token was {_seconds(slow)}, {slow / usual:.1f} times the old revision's "
                f"{_seconds(usual)}; at most {canary_spec.allowed_ttft_ratio:g} times is allowed (spec.rollout.canary.maxTTFTIncrease)"
            )
    return ""


def describe_results(report: SplitReport | None) -> str:
    """Return the results so far. They are coarse: a figure that changes with every poll would be written with every poll."""
    if report is None or not report.canary.requests:
        return "; it has had no requests yet"
    return f"; of {_about(report.canary.requests)} requests {_about(report.canary.errors)} failed"


def _about(count: int) -> str:
    """Round to one digit: 7, over 40, over 3000."""
    if count < 10:
        return str(count)
    size = 10 ** (len(str(count)) - 1)
    return f"over {count // size * size}"


def _errors(side: Side) -> str:
    return f"{side.errors} of {side.requests} requests ({_percent(side.error_rate)})"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2g} s"
