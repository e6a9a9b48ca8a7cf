"""One batch of static batching: its members, their padded prompts, and the rows of its steps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tidegate_engine.core.block_pool import BlockPool
from tidegate_engine.core.plan import PlanRow
from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingContext

_PADDING_TOKEN = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Member:
    """A request that waits for a batch or is in one.

    Attributes:
        arrival: Grows with every request.
        submitted_at: When it came, on the scheduler's clock.
        max_output_tokens: The request's, clipped to what fits the pool.
        token_ids: Prompt and output.
        sampling: How its tokens are chosen; shares `token_ids`.
        computed_tokens: Tokens of the padded prompt that were read, and one for each decode since.
        has_ended: Whether it goes on as padding alone.
        block_table: Empty while it waits.
    """

    request: Request
    arrival: int
    submitted_at: float
    max_output_tokens: int
    token_ids: list[int]
    sampling: SamplingContext = field(init=False)
    computed_tokens: int = 0
    has_ended: bool = False
    block_table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampling = SamplingContext(
            params=self.request.sampling,
            token_ids=self.token_ids,
            num_prompt_tokens=self.prompt_tokens,
            stop_token_ids=self.request.stop_token_ids,
        )

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def tenant(self) -> str:
        """The request's tenant."""
        return self.request.tenant

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, unpadded."""
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens generated so far."""
        return len(self.token_ids) - self.prompt_tokens


class PaddedBatch:
    """Requests that start together; the last of them to finish ends the batch.

    Every member holds the KV blocks of the longest prompt with the longest output, from the start
    until the batch is over or the member itself is taken out.
    """

    def __init__(self, pool: BlockPool) -> None:
        """Start empty."""
        self._pool = pool
        self._members: dict[str, Member] = {}
        self._padded_prompt = 0

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __bool__(self) -> bool:
        return bool(self._members)

    def get(self, request_id: str) -> Member | None:
        """Return a member, ended or not."""
        return self._members.get(request_id)

    def start(self, waiting: Iterable[Member], *, max_members: int) -> list[Member]:
        """Take from the head of a queue those who fit together; the batch must be empty.

        It stops at the first that doesn't fit: first come, first served. The very first always
        fits when its output is clipped to the pool.

        Returns:
            Who was taken, in order.
        """
        chosen: list[Member] = []
        longest_prompt = longest_output = blocks_each = 0
        for member in waiting:
            prompt = max(longest_prompt, member.prompt_tokens)
            output = max(longest_output, member.max_output_tokens)
            # The last output token is never cached.
            blocks = self._pool.blocks_for(prompt + output - 1)
            count = len(chosen) + 1
            if count > max_members or count * blocks > self._pool.num_free:
                break
            chosen.append(member)
            longest_prompt, longest_output, blocks_each = prompt, output, blocks
        for member in chosen:
            member.block_table = self._pool.allocate(blocks_each)
            self._members[member.request_id] = member
        self._padded_prompt = longest_prompt
        return chosen

    def rows(self, *, token_budget: int) -> tuple[PlanRow, ...]:
        """Describe the next step: prompts first, within the budget; then decodes of everybody."""
        return tuple(self._prefill_rows(token_budget) or self._decode_rows())

    def take_out(self, member: Member) -> None:
        """Take a member out, with its blocks."""
        del self._members[member.request_id]
        self._release(member)

    def close_if_over(self) -> None:
        """Take everybody out once all have ended."""
        if all(member.has_ended for member in self):
            for member in self:
                self._release(member)
            self._members.clear()

    def check_invariants(self) -> None:
        """Verify that the members' blocks are theirs alone and all that are used.

        Raises:
            AssertionError: They aren't, or a finished batch still holds blocks.
        """
        held = [block for member in self for block in member.block_table]
        self._pool.check_invariants(dict.fromkeys(held, 1))
        if len(set(held)) != len(held):
            raise AssertionError("a KV block is in two block tables")
        if self and all(member.has_ended for member in self):
            raise AssertionError("a finished batch holds its KV blocks")

    def _release(self, member: Member) -> None:
        self._pool.release(member.block_table)
        member.block_table = []

    def _prefill_rows(self, token_budget: int) -> list[PlanRow]:
        rows: list[PlanRow] = []
        for member in self:
            start = member.computed_tokens
            end = min(self._padded_prompt, start + token_budget)
            if start < end:
                rows += _chunk(member, start, end)
                token_budget -= end - start
        return rows

    def _decode_rows(self) -> Iterator[PlanRow]:
        for member in self:
            decoded = member.computed_tokens - self._padded_prompt
            yield PlanRow(
                request_id=member.request_id,
                start=member.prompt_tokens + decoded,
                token_ids=[_PADDING_TOKEN] if member.has_ended else member.token_ids[-1:],
                block_ids=member.block_table,
                samples=not member.has_ended,
                sampling=member.sampling,
                is_decode=True,
                is_padding=member.has_ended,
            )


def _chunk(member: Member, start: int, end: int) -> Iterator[PlanRow]:
    """Describe a part of a padded prompt: what is the member's own, and what is padding."""
    own_end = max(start, min(end, member.prompt_tokens))
    if start < own_end:
        yield PlanRow(
            request_id=member.request_id,
            start=start,
            token_ids=member.token_ids[start:own_end],
            block_ids=member.block_table,
            samples=own_end == member.prompt_tokens and not member.has_ended,
            sampling=member.sampling,
        )
    if own_end < end:
        yield PlanRow(
            request_id=member.request_id,
            start=own_end,
            token_ids=[_PADDING_TOKEN] * (end - own_end),
            block_ids=member.block_table,
            samples=False,
            sampling=member.sampling,
            is_padding=True,
        )
