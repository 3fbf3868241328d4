"""A request of a client as the backend takes it: one `Ask` for each answer."""

from __future__ import annotations

from dataclasses import replace

from executors.backend import Ask
from executors.engines.protocol import Sampling
from executors.frontend.encode import Encoded
from executors.frontend.requests.sampling import SEED
from executors.frontend.requests.wanted import Wanted
from executors.frontend.services import Call, Model, Services
from policies.cluster.events import Hints
from policies.cluster.ids import RequestId, Trait


def ask_of(services: Services, call: Call, model: Model, wanted: Wanted, prompt: Encoded, request_id: RequestId) -> Ask:
    """Without deadlines; caches of tenants are kept apart by a salt where that is configured."""
    asked, who = wanted.extensions, call.principal
    salt = asked.cache_salt
    if services.settings.access.tenant_isolation == "key" and who.name is not None:
        salt = who.name if salt is None else f"{who.name}/{salt}"
    return Ask(
        request_id=request_id,
        token_ids=prompt.token_ids,
        max_tokens=prompt.max_tokens,
        model=services.base(wanted.model) or wanted.model,
        sampling=wanted.sampling,
        priority=asked.priority,
        session_id=asked.session_id,
        lora=model.lora,
        tenant=who.name,
        cache_salt=salt,
        worker_hint=asked.worker,
        hints=_hints(wanted),
        traits=_traits(wanted),
    )


def seeded(sampling: Sampling, nth: int) -> Sampling:
    """Several answers to one prompt are not all the same answer."""
    if nth == 0 or sampling.seed is None:
        return sampling
    seed = sampling.seed + nth
    return replace(sampling, seed=seed if seed < SEED else seed - 2 * SEED)


def _hints(wanted: Wanted) -> Hints | None:
    asked = wanted.extensions
    made = Hints(
        required_taints=asked.required_taints,
        preferred_taints=asked.preferred_taints,
        policy_class=asked.policy_class,
        strict_priority=asked.strict_priority,
        osl_tokens=asked.osl_tokens,
    )
    return None if made == Hints() else made


def _traits(wanted: Wanted) -> tuple[Trait, ...]:
    """What a continuation on another worker may not be able to keep."""
    sampling = wanted.sampling
    drawn = sampling.temperature is None or sampling.temperature > 0
    found = {
        Trait.GUIDED: bool(sampling.grammar),
        Trait.MANY: wanted.n > 1,
        Trait.LOGPROBS: sampling.logprobs is not None,
        Trait.SAMPLED: drawn and sampling.seed is None,
    }
    return tuple(trait for trait, there in found.items() if there)
