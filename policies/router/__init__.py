"""Which worker gets a request. One `RequestArrived` in, one `Dispatch` or `Reject` out; one file per concern.

Here now: `settings` (all knobs), `build` (mode name to policy), `base` (what every mode shares: filters, pins,
sessions, refusals, explanations, counters), the modes `round_robin`, `random`, `least_loaded`, `power_of_two`,
`device_aware`, `direct` and `kv`, and what `kv` stands on: `walk` (shared prefixes of block paths), `index` (what
workers have cached), `books` (what they are working on), `cost` (the formula), `select` (filters, ties, softmax).
Around the mode, where they are asked for: `overload` (limits on load), `affinity` (sessions), `queued` (a router with a
queue in front) and `queue` (who goes next). `refusals` says what each refusal means to a client.

Where the rest of the router will stand:

* `disaggregation` routes two legs: a policy that owns two modes, one per leg, each with its own candidates by role.
* `chains` is the index for engines' own block events (and, guessed, for engines without any); a live router asks it
  where mode `kv` asks `index` now. `index` stays: the simulator's events name branches and lose nothing.
* `replica_sync` feeds `books.Books` with the bookings of other routers.

No file here reads a clock or draws a number other than through `policies.cluster.draws`.
"""
