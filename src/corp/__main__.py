"""python -m corp"""

from corp.cli.main import main

main()
