"""`python -m wpr`, and with it `accelerate launch -m wpr`."""

from wpr.cli import main

main()
