"""Everything about files: what each holds, as validated types, and how it is read and written safely.

Imports no torch but in `tensors`.
"""
