"""The outputs of a step, which two look at: the controller of the number of drafts, and connectors of extraction."""

from typing import Any

from proposers.hidden_states.plan import connector_of_records
from proposers.host.adaptive import controller_of, end_step
from proposers.host.patching import patch


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    ("self", "scheduler_output", "model_runner_output"),
    why="here the output of a step is known to be there, with overlapped scheduling, too, which is the controller's "
    "clock. And a finished output leaves in the step in which the request ends, while a connector's transfers begin in "
    "the next: the path in it would be that of a file which doesn't exist yet, or never will.",
    upstream="none yet",
    until="a connector can hold back the outputs of requests whose transfer is not done, and a plugin chooses the "
    "number of drafts of a step",
)
def follow_outputs(original: Any) -> Any:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        controller = controller_of(self)
        if controller is not None:
            controller.end_step()
        connector = connector_of_records(self.connector)
        if connector is not None and connector.step_log is not None:
            connector.step_log.note(self.requests, scheduler_output, model_runner_output)
        outputs = original(self, scheduler_output, model_runner_output)
        if controller is not None:
            end_step(self, controller, scheduler_output)
        return outputs if connector is None else connector.hold_back(outputs)

    return update_from_output


PATCHES = (follow_outputs,)
