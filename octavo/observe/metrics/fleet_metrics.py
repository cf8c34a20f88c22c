"""Metrics of a fleet that its engines cannot give: one that has ended answers no question."""

from octavo.messages import FleetState
from octavo.observe.metrics.exposition import Scrape


def fleet_metrics(fleet: FleetState) -> str:
    scrape = Scrape({})
    scrape.gauge(
        "octavo:replica_ready",
        "1: the replica takes requests. 0: it starts, drains, waits for room or has failed. `place`: its cores, GPUs or node.",
        [
            ({"engine": str(each.replica), "place": each.place}, float(each.status == "ready"))
            for each in fleet.replicas
        ],
    )
    scrape.gauge("octavo:replicas_wanted", "Replicas that there should be.", [({}, float(fleet.target))])
    return scrape.text()
