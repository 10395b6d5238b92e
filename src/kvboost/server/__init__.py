"""The HTTP server: OpenAI's and TGI's API over a `kvboost.serving.Service`. The only importer of FastAPI.

edge -> openai_chat | openai_completions | tgi | models | health
-> backend: prompt, sampling, settings -> Job -> Service -> pieces -> answer or stream
"""

from kvboost.server.app import make_app
from kvboost.server.options import ServerOptions

__all__ = ["ServerOptions", "make_app"]
