"""Time for the ages of replicas' reports, as it passes in an ingress that Serve's controller calls every second."""

from dataclasses import dataclass

from serve_app.replicas.reports import ReplicaReports, Report


def said(beat: int, *, is_ready: bool = True) -> Report:
    """A report that counts for 7 s."""
    return Report(is_ready, b"", beat, 7.0)


@dataclass
class Clock:
    time_s: float = 1000.0

    def now(self) -> float:
        return self.time_s

    def run(self, reports: ReplicaReports, seconds: float) -> None:
        """Let time pass, with a call of the controller at each second."""
        reports.controller_called()
        for _ in range(int(seconds)):
            self.time_s += 1.0
            reports.controller_called()
