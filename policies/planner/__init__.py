"""How many workers there are, of which role: from traffic and engines to orders.

`planner` is the policy (`build` makes it from `settings`); the stages in order: `windows` and `samples` take in,
`forecast` foresees, `step_model` and `capacity` say what an engine can do, `slow_loop` (`throughput`) and `fast_loop`
(`load`, `experience`) propose, `asking` (`lookahead`, `trust`) asks the twin, `reconcile` (`merge`) makes it one,
`constrain` (`budget`, `patience`) bounds it, `decisions` (`fleet`, `who_goes`) orders it, `records` keeps why.
`global_planner` divides one pool of GPUs among many deployments.

No file here reads a clock or draws a number other than through `policies.cluster.draws`.
"""
