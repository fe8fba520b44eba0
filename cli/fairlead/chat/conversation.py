"""The conversation: it grows by a question and its answer, and both ends belong to the caller."""

from collections.abc import Callable

from fairlead.chat.client import ChatClient, ChatFailed, Message


class Conversation:
    """Messages so far. `show` gets each piece of an answer as it arrives."""

    def __init__(self, client: ChatClient, model: str, system: str, show: Callable[[str], None]) -> None:
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._client = client
        self._model = model
        self._show = show

    def ask(self, question: str) -> bool:
        """Show the answer to `question`. Return False if Ctrl-C stopped it: the part that came stays in the conversation.

        Raises ChatFailed; the conversation is then as before the question.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        stream = self._client.stream(self._model, asked)
        is_whole = False
        try:
            for piece in stream:
                pieces.append(piece)
                self._show(piece)
            is_whole = True
        except KeyboardInterrupt:
            pass
        finally:
            stream.close()
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        return is_whole


def talk(conversation: Conversation, read: Callable[[], str], say: Callable[[str], None]) -> None:
    """Ask what `read` returns until it raises EOFError (Ctrl-D). `say` ends each answer, with a notice or none."""
    while True:
        try:
            question = read().strip()
        except KeyboardInterrupt:
            say("Ctrl-D ends the chat")
            continue
        except EOFError:
            return
        if not question:
            continue
        try:
            is_whole = conversation.ask(question)
            say("" if is_whole else "stopped")
        except ChatFailed as error:
            say(str(error))
