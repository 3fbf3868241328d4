"""What a run hands over: its record, the metrics, and the tables, pages and traces that people read.

Importing this package costs nothing; the parts that need heavy packages import them when they are called.
"""
