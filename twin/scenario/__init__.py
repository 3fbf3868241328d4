"""Scenarios of faults: `model` (what one is), `kinds`, `reading` (a file), `times` (when, and whom), `table`."""
