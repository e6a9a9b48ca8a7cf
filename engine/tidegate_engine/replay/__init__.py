"""Traffic in virtual time: any scheduler, any executor and a clock that only they move.

It knows core and executor; it reads no real clock and draws nothing at random, so the same arrivals
give the same log.
"""
