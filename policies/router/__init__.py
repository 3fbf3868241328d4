"""Which worker gets a request. One `RequestArrived` in, one `Dispatch` or `Reject` out; one file per concern.

Here now: `settings` (all knobs), `build` (mode name to policy), `base` (what every mode shares: pins, refusals,
explanations, counters), the modes `round_robin`, `random`, `least_loaded`, `power_of_two`, `direct` and `kv`, and what
`kv` stands on: `walk` (shared prefixes of block paths), `index` (what workers have cached), `books` (what they are
working on), `cost` (the formula), `select` (eligibility, ties, softmax).

Where the rest of the router will stand:

* `queue` holds requests back while every worker is busy with prompts: an `Enqueue` action before the mode is asked,
  in `base.Router._route`; its order and classes know nothing of modes.
* `shedding` refuses when workers are overloaded: one more reason in `select.why_not`, one more code of `Reject`.
* `affinity` prefers the worker of a session: a preference that `base` asks before the mode, past which no filter goes.
* `disaggregation` routes two legs: a policy that owns two modes, one per leg, each with its own candidates by role.
* `device_aware` (mode device-aware-weighted) is a mode like `least_loaded`, over two groups.
* `chains` is the index for engines' own block events (and, guessed, for engines without any); a live router asks it
  where mode `kv` asks `index` now. `index` stays: the simulator's events name branches and lose nothing.
* `replica_sync` feeds `books.Books` with the bookings of other routers.

No file here reads a clock or draws a number other than through `policies.cluster.draws`.
"""
