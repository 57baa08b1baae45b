"""A tool loop with OpenAI's Agents SDK, over chat completions: the task is the argument."""

import os
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def read_file(path: str) -> str:
    """Show a file."""
    return Path(path).read_text()


client = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
model = OpenAIChatCompletionsModel(model="jaxserve-demo", openai_client=client)
agent = Agent(name="Reader", instructions="Read files.", model=model, tools=[read_file])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
