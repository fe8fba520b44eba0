"""The log of hash chains: bounded by prompts and by blocks, and separate for tenants."""

from array import array

from fairlead_router.request.request_log import MAX_BLOCKS, MAX_BLOCKS_OF_PROMPT, MAX_PROMPTS, RequestLog


def test_the_oldest_prompts_leave_beyond_the_number_of_prompts() -> None:
    log = RequestLog()
    for number in range(MAX_PROMPTS + 5):
        log.record_prefix("", array("Q", [number]))
    assert [chain[0] for chain in log.chains(None)] == list(range(5, MAX_PROMPTS + 5))


def test_the_oldest_prompts_leave_beyond_the_number_of_blocks_and_a_long_prompt_is_cut() -> None:
    log = RequestLog()
    for _ in range(MAX_BLOCKS // MAX_BLOCKS_OF_PROMPT + 5):
        log.record_prefix("", array("Q", range(MAX_BLOCKS_OF_PROMPT + 100)))
    chains = list(log.chains(None))
    assert sum(map(len, chains)) == MAX_BLOCKS and {len(chain) for chain in chains} == {MAX_BLOCKS_OF_PROMPT}


def test_a_tenant_gets_only_its_own_and_a_prompt_without_a_block_is_left_out() -> None:
    log = RequestLog()
    log.record_prefix("anna", array("Q", [1, 2]))
    log.record_prefix("boris", array("Q", [3]))
    log.record_prefix("boris", array("Q"))
    assert [list(chain) for chain in log.chains("anna")] == [[1, 2]] and [list(chain) for chain in log.chains("boris")] == [[3]]
    assert len(list(log.chains(None))) == 2


def test_a_busy_tenant_pushes_out_its_own_prompts_first() -> None:
    log = RequestLog()
    log.record_prefix("boris", array("Q", [3]))
    for number in range(MAX_PROMPTS + 5):
        log.record_prefix("anna", array("Q", [number]))
    for _ in range(MAX_BLOCKS // MAX_BLOCKS_OF_PROMPT + 5):
        log.record_prefix("anna", array("Q", range(MAX_BLOCKS_OF_PROMPT)))
    assert len(log.chains("boris")) == 1 and sum(map(len, log.chains(None))) <= MAX_BLOCKS
