"""What comes next, from what came: one file per forecaster, and a guard that every one of them stands behind.

`series.Forecaster` is the interface, `guarded.Guarded` what the planner holds, `build.forecaster` makes one by name,
`backtest.backtest` compares them on a recorded series.
"""
