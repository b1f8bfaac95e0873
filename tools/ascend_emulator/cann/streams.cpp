// Streams and events. Everything runs at once and in order, so a stream is a name and an event is a moment.
#include "runtime.h"

#include <atomic>
#include <chrono>

namespace {

struct Stream {
  int32_t id;
};

struct Event {
  double milliseconds;
};

double now() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

// ---- streams ----

aclError aclrtCreateStream(aclrtStream* stream) {
  static std::atomic<int32_t> last_id{0};
  *stream = new Stream{++last_id};
  return ACL_SUCCESS;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }

aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<Stream*>(stream);
  return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtSynchronizeStream(aclrtStream) { return ACL_SUCCESS; }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ACL_SUCCESS; }

aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }

aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus* status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

// Null is the default stream.
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream ? static_cast<Stream*>(stream)->id : 0;
  return ACL_SUCCESS;
}

// ---- events ----

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Event{0};
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  static_cast<Event*>(event)->milliseconds = now();
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }

aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const double passed = static_cast<Event*>(end)->milliseconds - static_cast<Event*>(start)->milliseconds;
  *milliseconds = static_cast<float>(passed);
  return ACL_SUCCESS;
}

}  // extern "C"
