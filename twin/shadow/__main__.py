"""`python -m twin.shadow`: started by `twin serve --shadow`, never by hand."""

from __future__ import annotations

from twin.shadow.process import main

if __name__ == "__main__":
    main()
