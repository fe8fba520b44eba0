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
    max_header_bytes: Annotated[int, Field(ge=1024, description="bytes of a request line and headers; more get 431")] = 64 * 1024
    max_headers: Annotated[int, Field(ge=8, description="headers of a request; more get 431")] = 128
    max_body_bytes: Annotated[Positive, Field(description="bytes of a request body; more get 413")] = 8 * MIB
    header_timeout: Annotated[Seconds, Field(description="seconds for the headers of a request to arrive; then 408")] = 10
    body_timeout: Annotated[Seconds, Field(description="seconds for the body of a request to arrive; then 408")] = 60
    max_logprob_entries: Annotated[
        NonNegative,
        Field(description="log-probabilities of a response: tokens of prompts and outputs times the alternatives of each; 0: no limit"),
    ] = MIB
    token_cache_bytes: Annotated[
        NonNegative, Field(description="bytes of memory for the token ids of earlier prompts that came without a router; 0: none")
    ] = 64 * MIB
    max_grammar_bytes: Annotated[
        NonNegative, Field(description="bytes of the schema, regular expression or grammar of a request; 0: no structured output")
    ] = 64 * 1024
    grammar_timeout: Annotated[Seconds, Field(description="seconds to compile a grammar, and to compute one of its masks")] = 5
    grammar_cache_entries: Annotated[Positive, Field(description="compiled grammars that are kept")] = 64
    grammar_threads: Annotated[Positive, Field(description="threads that compile grammars and compute masks")] = 2
    stored_responses: Annotated[
        int, Field(ge=0, le=10**6, description="responses that Redis keeps for a tenant (`store: true`), its newest ones; 0: none")
    ] = 256
    stored_response_bytes: Annotated[
        int, Field(ge=1, le=8 * MIB, description="bytes of a stored response with the conversation before it, at most 8 MiB")
    ] = 256 * 1024
    stored_tenant_bytes: Annotated[Positive, Field(description="bytes of a tenant's stored responses; its oldest ones make room")] = 8 * MIB
    stored_service_bytes: Annotated[
        Positive, Field(description="bytes of all stored responses; a tenant gets at most an equal share, and makes room by its own only")
    ] = 64 * MIB
    stored_response_seconds: Annotated[Positive, Field(description="seconds that a stored response is kept")] = 86_400
    idle_prefill_chunks: Annotated[Positive, Field(description="chunks that a step may prefill while no request decodes")] = 5
    dedupe_tokens: Annotated[
        NonNegative, Field(description="tokens of the shortest prefix that requests of one step compute together; 0: none")
    ] = 32
    state_snapshots: Annotated[
        NonNegative, Field(description="snapshots of recurrent states that the prefix cache holds; 0: what half of the memory for KV holds")
    ] = 0
    piecewise_graph_tokens: Annotated[
        NonNegative,
        Field(description="tokens of the largest step with prompts that runs as piecewise CUDA graphs, where launches are slow; 0: none"),
    ] = 2048
    load_timeout: Annotated[Seconds, Field(description="seconds without progress after which loading the model fails")] = 120
    engine_timeout: Annotated[Seconds, Field(description="seconds without a message after which a ready engine counts as dead")] = 120
    lease_seconds: Annotated[Seconds, Field(description="seconds after which the index forgets a worker that sent nothing")] = 10
