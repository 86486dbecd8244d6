// Errors as values: a code and a message that names the argument, what it was, what is accepted.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace flashmla {

// Values are pinned: they are the status codes of the C ABI.
enum class StatusCode : std::int32_t {
  kOk = 0,
  kInvalidArgument = 1,
  kUnsupported = 2,
  kOutOfMemory = 3,
  kInternal = 4,
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status invalid_argument(std::string message) {
    return {StatusCode::kInvalidArgument, std::move(message)};
  }
  static Status unsupported(std::string message) {
    return {StatusCode::kUnsupported, std::move(message)};
  }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value, or the reason why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Status error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return state_.index() == 0; }
  // Only when ok().
  const T& value() const { return *std::get_if<0>(&state_); }
  T& value() { return *std::get_if<0>(&state_); }
  Status status() const { return ok() ? Status() : *std::get_if<1>(&state_); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace flashmla
