"""Is a canary worse than what it would replace? In words for people, or nothing."""

from fairlead_common.canary_split import Side, SplitReport
from fairlead_operator.api.canary import Canary

NOISE = 0.01  # seconds: a difference of first tokens below this is nobody's complaint
QUANTILES = (0.5, 0.9)


def error_problem(report: SplitReport, asked: Canary) -> str:
    """Its share of failed requests against the other side's: what fails everywhere (a flood of bad requests) is no fault of it."""
    canary, stable = report.canary, report.stable
    if canary.error_rate <= stable.error_rate + asked.allowed_error_rate_increase:
        return ""
    allowed = f"at most {_percent(asked.allowed_error_rate_increase)} more may (spec.rollout.canary.maxErrorRateIncrease)"
    return f"{_errors(canary)} failed, of the old revision {_errors(stable)}; {allowed}"


def ttft_problem(report: SplitReport, asked: Canary) -> str:
    """Its time to first token against the other side's, where both have been measured."""
    canary, stable = report.canary.ttft, report.stable.ttft
    if not canary.count or not stable.count:
        return ""
    for share in QUANTILES:
        slow, usual = canary.quantile(share), stable.quantile(share)
        if slow > asked.allowed_ttft_ratio * usual and slow - usual > NOISE:
            return (
                f"its p{100 * share:.0f} time to first token was {_seconds(slow)}, {slow / usual:.1f} times the old revision's "
                f"{_seconds(usual)}; at most {asked.allowed_ttft_ratio:g} times is allowed (spec.rollout.canary.maxTTFTIncrease)"
            )
    return ""


def figures(report: SplitReport | None) -> str:
    """What was seen so far, coarse: a figure that changes with every look would be written with every look."""
    if report is None or not report.canary.requests:
        return "; it has had no requests yet"
    return f"; of {_about(report.canary.requests)} requests {_about(report.canary.errors)} failed"


def _about(count: int) -> str:
    """To one digit: 7, over 40, over 3000."""
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
