"""`poise` of a version that speaks another protocol with agents: `python other_protocol.py WORD...`."""

from poise.cli import main
from poise.service.wire import agent_messages

agent_messages.PROTOCOL = 99
main()
