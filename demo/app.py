"""The page as a Hugging Face Space runs it; elsewhere `separate-demo` does the same."""

import sys

from separator.web_server import main

if __name__ == "__main__":
    sys.exit(main())
