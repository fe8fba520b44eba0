"""`fairlead-worker --help` is short: few flags, each in a topic and with a description."""

import pytest

from fairlead_worker.config import Limits, SpeculativeConfig, WorkerConfig
from fairlead_worker.config.options import TOPICS, flag_name, topic_of, variable_name

MOST_FLAGS, MOST_DESCRIPTION = 51, 160
FLAGS = [name for name, field in WorkerConfig.model_fields.items() if topic_of(field)]
SETTINGS = [name for name, field in WorkerConfig.model_fields.items() if not topic_of(field)]


def test_there_are_few_flags_in_few_topics() -> None:
    assert len(FLAGS) <= MOST_FLAGS, "make it a key of --limits, or a setting with env_only()"
    assert len(TOPICS) <= 10
    assert {topic_of(WorkerConfig.model_fields[name]) for name in FLAGS} == set(TOPICS)


@pytest.mark.parametrize("model", [WorkerConfig, Limits, SpeculativeConfig], ids=lambda model: model.__name__)
def test_every_setting_has_a_short_description(model: type[WorkerConfig | Limits | SpeculativeConfig]) -> None:
    descriptions = {name: (field.description or "").partition(" with the keys ")[0] for name, field in model.model_fields.items()}
    assert {name: text for name, text in descriptions.items() if not 10 <= len(text.partition(" (auto, none")[0]) <= MOST_DESCRIPTION} == {}


def test_help_shows_each_flag_under_its_topic_and_no_other_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit:
        WorkerConfig.from_command_line(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    sections = {part.partition(":\n")[0]: part for part in text.split("\n\n")}
    assert [topic for topic in sections if topic in TOPICS] == list(TOPICS)
    for name in FLAGS:
        assert f"\n  {flag_name(name)}" in sections[topic_of(WorkerConfig.model_fields[name])]
    assert not [name for name in SETTINGS if f"{flag_name(name)} " in text]
    assert variable_name("max_num_seqs") in text and max(map(len, text.splitlines())) <= 100
