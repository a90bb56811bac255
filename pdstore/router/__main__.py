"""`python -m pdstore.router`: the command `pdstore-router` where scripts are not on the path."""

from pdstore.router.main import main

main()
