"""`--limits`: numbers that are rarely changed."""

from typing import Annotated, Final

from pydantic import Field

from fairlead_worker.config.values import ConfigObject

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MIB: Final = 1 << 20


class Limits(ConfigObject):
    """The keys of `--limits`. The limits of connections have the names of the router's flags."""

    max_connections: Annotated[Positive, Field(description="connections of a port; further ones get 503, except probes")] = 10_000
    max_body_bytes: Annotated[Positive, Field(description="bytes of a request body; more get 413")] = 8 * MIB
    header_timeout: Annotated[Seconds, Field(description="seconds for the headers of a request to arrive; then 408")] = 10
    body_timeout: Annotated[Seconds, Field(description="seconds for the body of a request to arrive; then 408")] = 60
    max_grammar_bytes: Annotated[
        NonNegative, Field(description="bytes of the schema, regular expression or grammar of a request; 0: no structured output")
    ] = 64 * 1024
    grammar_timeout: Annotated[Seconds, Field(description="seconds to compile a grammar, and to compute one of its masks")] = 5
    stored_responses: Annotated[
        int, Field(ge=0, le=10**6, description="responses that Redis keeps for a tenant (`store: true`), its newest ones; 0: none")
    ] = 256
    state_snapshots: Annotated[
        NonNegative, Field(description="snapshots of recurrent states that the prefix cache holds; 0: what half of the memory for KV holds")
    ] = 0
    load_timeout: Annotated[Seconds, Field(description="seconds without progress after which loading the model fails")] = 120
    engine_timeout: Annotated[Seconds, Field(description="seconds without a message after which a ready engine counts as dead")] = 120
