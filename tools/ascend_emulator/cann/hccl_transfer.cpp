#include "hccl_transfer.h"

#include "hccl_reduce.h"

#include <algorithm>
#include <cstring>

namespace emulator {

namespace {

struct Transfer {
  Mailbox* box;
  char* data;
  size_t left;
  bool sends;
};

// Moves at most one mailbox full; false when the peer has to act first.
bool advance(Transfer& item) {
  if (static_cast<bool>(item.box->full) == item.sends) return false;
  const size_t length = std::min(kMailboxBytes, item.left);
  if (item.sends)
    std::memcpy(item.box->payload, item.data, length);
  else
    std::memcpy(item.data, item.box->payload, length);
  item.box->full = item.sends;
  item.data += length;
  item.left -= length;
  return true;
}

}  // namespace

HcclResult transfer(Segment& segment, const std::vector<HcclSendRecvItem>& items) {
  std::vector<Transfer> open;
  for (const auto& item : items) {
    const bool sends = item.sendRecvType == HCCL_SEND;
    Mailbox* box = sends ? segment.mailbox(segment.rank(), item.remoteRank)
                         : segment.mailbox(item.remoteRank, segment.rank());
    open.push_back({box, static_cast<char*>(item.buf), item.count * element_bytes(item.dataType), sends});
  }
  return wait_until([&] {
    bool complete = true;
    for (auto& item : open) {
      while (item.left && advance(item)) {
      }
      complete = complete && item.left == 0;
    }
    return complete;
  });
}

}  // namespace emulator
