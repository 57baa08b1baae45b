"""A tool loop with OpenHands' SDK: the task is the argument."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

llm = LLM(model="openai/jaxserve-demo", base_url=os.environ["OPENAI_BASE_URL"], api_key=SecretStr("none"))
conversation = Conversation(agent=Agent(llm=llm, tools=[Tool(name=TerminalTool.name)]), workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
