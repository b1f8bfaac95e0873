// Point-to-point traffic of the emulated HCCL.
#pragma once

#include "hccl_segment.h"

#include <vector>

namespace emulator {

// Moves a batch of sends and receives forward together until each is complete, so that their order cannot deadlock.
HcclResult transfer(Segment& segment, const std::vector<HcclSendRecvItem>& items);

}  // namespace emulator
