"""The rows of the table, by family of packages. Importing this package registers them."""

from importlib import import_module
from pathlib import Path

for _file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"rows.{_file.stem}")
