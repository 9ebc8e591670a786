#include "transport/security/tls.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/lifetime.h"
#include "transport/security/openssl.h"

namespace geartrain {
namespace {

constexpr size_t kRecord = size_t{16} << 10;      // TLS has no larger ones
constexpr size_t kGatherBelow = size_t{4} << 10;  // parts that share a record with their neighbours
constexpr size_t kBatch = size_t{128} << 10;      // encrypted in one batch, then written to the socket in one call
constexpr size_t kInBytes = size_t{128} << 10;

// Other libraries of the process may use the same OpenSSL and have it clean up at exit, while the sideband
// thread still runs. From then on no thread of ours calls it.
std::atomic<bool> leaving{false};
// A fork waits until no thread is within: a child would find OpenSSL's locks held for ever, and sessions half changed,
// which it has to end. Meanwhile no other thread begins. None has a lock that a handler of a fork takes.
std::atomic<int> inside{0}, forking{0};
constexpr uint64_t kLongestNs = 1'000'000'000;  // of waits for those within

class Inside {
 public:
  Inside() {
    inside.fetch_add(1);
    while (forking.load() != 0) {
      inside.fetch_sub(1);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      inside.fetch_add(1);
    }
    allowed_ = !leaving.load();
  }
  ~Inside() { inside.fetch_sub(1); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  explicit operator bool() const { return allowed_; }

 private:
  bool allowed_;
};

void wait_until_none_is_inside() {
  const uint64_t until_ns = monotonic_ns() + kLongestNs;
  while (inside.load() != 0 && monotonic_ns() < until_ns) std::this_thread::yield();
}

struct ExitAndForks {
  ExitAndForks() {
    std::atexit([] {
      leaving.store(true);
      wait_until_none_is_inside();
    });
  }
  void before_fork() {
    forking.fetch_add(1);
    wait_until_none_is_inside();
  }
  void after_fork(bool in_child) {
    if (in_child) {  // which has none of the threads
      inside.store(0);
      forking.store(0);
    } else {
      forking.fetch_sub(1);
    }
  }
};

// The oldest error of this thread's, and no other after it.
unsigned long take_error() {
  const unsigned long error = openssl().ERR_get_error();
  openssl().ERR_clear_error();
  return error;
}

std::string in_words(unsigned long error) {
  const char* text = error == 0 ? nullptr : openssl().ERR_reason_error_string(error);
  return text == nullptr ? "for no reason that OpenSSL gives" : text;
}

// The peer's alert, received as an error; 0: it is none.
unsigned alert_of(unsigned long error) {
  const unsigned long library = (error >> 23) & 0xff, reason = error & 0x7fffff;
  return library == 20 && reason > 1000 && reason < 1256 ? static_cast<unsigned>(reason - 1000) : 0;
}

// Why a peer refuses this side's certificate; null: the alert is about something else.
const char* refusal(unsigned alert) {
  switch (alert) {
    case 42:
    case 43:
    case 46:
      return "it is not valid, or not for this name or this use";
    case 44:
      return "it was revoked";
    case 45:
      return "it has expired";
    case 48:
      return "another authority signed it than the one that the peer trusts";
    case 116:
      return "there is none";
    default:
      return nullptr;
  }
}

std::string why_not_trusted(long result, const std::string& for_whom) {
  switch (result) {
    case 9:
      return "it is not valid yet";
    case 10:
      return "it has expired";
    case 18:
    case 19:
    case 20:
    case 21:
      return "another authority signed it than the one in `ca`";
    case 62:
    case 64:
      return "it is not for " + for_whom;
    default:
      return openssl().X509_verify_cert_error_string(result);
  }
}

bool is_ip(const std::string& host) {
  unsigned char scrap[16];
  return ::inet_pton(AF_INET, host.c_str(), scrap) == 1 || ::inet_pton(AF_INET6, host.c_str(), scrap) == 1;
}

void check_readable(const std::string& file, const char* what) {
  if (file.empty()) fail(ErrorKind::argument, "TLS needs a certificate, its key and the peers' authority; no ", what);
  if (::access(file.c_str(), R_OK) != 0) {
    fail(ErrorKind::argument, "cannot read the ", what, " '", file, "': ", std::strerror(errno));
  }
}

}  // namespace

// --- certificate and trusted authority of a process -----------------------------------------------------------------

std::shared_ptr<const TlsContext> TlsContext::load(const TlsFiles& files) {
  return std::shared_ptr<const TlsContext>(new TlsContext(files));
}

TlsContext::TlsContext(const TlsFiles& files)
    : name_(files.name), rekey_bytes_(files.rekey_bytes), threads_(files.threads) {
  of_process<ExitAndForks>();
  const Inside in;
  const OpenSsl& api = openssl();
  check_readable(files.certificate, "certificate");
  check_readable(files.key, "key");
  check_readable(files.ca, "ca");
  if (!in) fail(ErrorKind::not_viable, "the process ends");
  api.ERR_clear_error();
  std::unique_ptr<SslContext, void (*)(SslContext*)> made(api.SSL_CTX_new(api.TLS_method()), api.SSL_CTX_free);
  SslContext* context = made.get();
  const auto check = [&](bool good, const char* what, const std::string& file) {
    if (!good) fail(ErrorKind::argument, "cannot use the ", what, " '", file, "': ", in_words(take_error()));
  };
  if (context == nullptr || api.SSL_CTX_ctrl(context, OpenSsl::kMinProtocol, OpenSsl::kTls13, nullptr) != 1 ||
      api.SSL_CTX_set_ciphersuites(context,
                                   "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256") != 1) {
    fail(ErrorKind::not_viable, "this OpenSSL has no TLS 1.3: ", in_words(take_error()));
  }
  api.SSL_CTX_ctrl(context, OpenSsl::kSessionCacheMode, 0, nullptr);
  api.SSL_CTX_set_num_tickets(context, 0);  // no resumption: each connection is authenticated anew
  api.SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return -1; });  // and prompts no terminal
  check(api.SSL_CTX_use_certificate_chain_file(context, files.certificate.c_str()) == 1, "certificate",
        files.certificate);
  // Which compares the two.
  check(api.SSL_CTX_use_PrivateKey_file(context, files.key.c_str(), OpenSsl::kPem) == 1, "key", files.key);
  check(api.SSL_CTX_load_verify_locations(context, files.ca.c_str(), nullptr) == 1, "ca", files.ca);
  api.SSL_CTX_set_verify(context, OpenSsl::kVerifyPeer | OpenSsl::kFailWithoutCertificate, nullptr);
  context_ = made.release();
}

TlsContext::~TlsContext() {
  const Inside in;
  if (in && context_ != nullptr) openssl().SSL_CTX_free(context_);
}

// --- between OpenSSL and the socket ---------------------------------------------------------------------------------

// OpenSSL's own socket BIO reads a record in two calls, writes each in one, and lets a broken pipe be a signal.
struct Tls::Sockets {
  // From what has arrived already; when there is nothing, as much as there is room for.
  static int read(Bio* bio, char* to, int most) {
    const OpenSsl& api = openssl();
    Tls& tls = *static_cast<Tls*>(api.BIO_get_data(bio));
    api.BIO_clear_flags(bio, OpenSsl::kRetryRead);
    while (tls.in_taken_ == tls.in_filled_) {
      if (tls.at_end_ || tls.read_error_ != 0) return tls.at_end_ ? 0 : -1;
      if (tls.drained_) {
        api.BIO_set_flags(bio, OpenSsl::kRetryRead);
        return -1;
      }
      const ssize_t got = ::recv(tls.socket_, tls.in_.get(), kInBytes, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno != EAGAIN) tls.read_error_ = errno;
      if (got == 0) tls.at_end_ = true;
      tls.in_taken_ = 0;
      tls.in_filled_ = got > 0 ? static_cast<size_t>(got) : 0;
      tls.drained_ = tls.in_filled_ < kInBytes;  // the next time the socket is readable
      const size_t first = std::min(sizeof tls.first_ - tls.first_filled_, tls.in_filled_);
      std::memcpy(tls.first_ + tls.first_filled_, tls.in_.get(), first);
      tls.first_filled_ += first;
    }
    const size_t bytes = std::min(static_cast<size_t>(most), tls.in_filled_ - tls.in_taken_);
    std::memcpy(to, tls.in_.get() + tls.in_taken_, bytes);
    tls.in_taken_ += bytes;
    return static_cast<int>(bytes);
  }

  static int write(Bio* bio, const char* from, int bytes) {
    Tls& tls = *static_cast<Tls*>(openssl().BIO_get_data(bio));
    const auto* begin = reinterpret_cast<const std::byte*>(from);
    try {
      tls.out_.insert(tls.out_.end(), begin, begin + bytes);
    } catch (const std::bad_alloc&) {  // nothing may be thrown through a library of C
      tls.write_error_ = ENOMEM;
      return -1;
    }
    return bytes;
  }

  static long control(Bio*, int what, long, void*) { return what == OpenSsl::kBioFlush; }

  static Bio* make(Tls* tls) {
    const OpenSsl& api = openssl();
    static const BioMethod* method = [&] {
      BioMethod* made = api.BIO_meth_new(api.BIO_get_new_index() | OpenSsl::kBioSourceSink, "geartrain");
      if (made == nullptr) fail(ErrorKind::no_space, "no memory for TLS");
      api.BIO_meth_set_read(made, read);
      api.BIO_meth_set_write(made, write);
      api.BIO_meth_set_ctrl(made, control);
      return made;
    }();
    Bio* bio = api.BIO_new(method);
    if (bio == nullptr) fail(ErrorKind::no_space, "no memory for TLS");
    api.BIO_set_data(bio, tls);
    api.BIO_set_init(bio, 1);
    return bio;
  }
};

Tls::Tls(std::shared_ptr<const TlsContext> context, int socket, const std::string* host)
    : context_(std::move(context)),
      socket_(socket),
      peer_(!context_->name_.empty() ? context_->name_
            : host != nullptr        ? *host
                                     : "this side"),
      in_(new std::byte[kInBytes]) {
  const OpenSsl& api = openssl();
  const Inside in;
  if (!in) fail(ErrorKind::peer_lost, "the process ends");
  ssl_ = api.SSL_new(context_->context_);
  if (ssl_ == nullptr) fail(ErrorKind::no_space, "no memory for TLS");
  Bio* bio = Sockets::make(this);
  api.SSL_set_bio(ssl_, bio, bio);
  if (host != nullptr || !context_->name_.empty()) {
    api.SSL_set_hostflags(ssl_, OpenSsl::kNoWildcards | OpenSsl::kNeverTheSubject);
    if (is_ip(peer_) ? api.X509_VERIFY_PARAM_set1_ip_asc(api.SSL_get0_param(ssl_), peer_.c_str()) != 1
                     : api.SSL_set1_host(ssl_, peer_.c_str()) != 1) {
      api.SSL_free(ssl_);
      fail(ErrorKind::argument, "no certificate can be for '", peer_, "'");
    }
  }
  host != nullptr ? api.SSL_set_connect_state(ssl_) : api.SSL_set_accept_state(ssl_);
}

Tls::~Tls() {
  const Inside in;
  if (in) openssl().SSL_free(ssl_);  // and the BIO
}

// --- the handshake --------------------------------------------------------------------------------------------------

Tls::Step Tls::shake_hands() {
  const OpenSsl& api = openssl();
  const Inside in;
  if (!in) fail(ErrorKind::peer_lost, "the process ends");
  std::lock_guard lock(mutex_);
  drained_ = false;
  api.ERR_clear_error();
  const int result = api.SSL_do_handshake(ssl_);
  const int why = result == 1 ? 0 : api.SSL_get_error(ssl_, result);
  const bool sent = drain();  // an alert as well
  if (result == 1) {
    const void* cipher = api.SSL_get_current_cipher(ssl_);
    if (cipher != nullptr) described_ = std::string("TLSv1.3 ") + api.SSL_CIPHER_get_name(cipher);
    return sent ? Step::done : Step::wants_write;
  }
  if (why == OpenSsl::kWantRead || why == OpenSsl::kWantWrite) return sent ? Step::wants_read : Step::wants_write;
  fail_handshake();
}

void Tls::fail_handshake() {
  const OpenSsl& api = openssl();
  const unsigned long error = take_error();
  if (first_filled_ == sizeof first_ && std::memcmp(first_, kHelloMagic, sizeof first_) == 0) {
    fail(ErrorKind::untrusted, "the peer uses no TLS, and it was asked for here");
  }
  const long verified = api.SSL_get_verify_result(ssl_);
  if (verified != 0) {
    fail(ErrorKind::untrusted, "the peer's certificate is refused: ", why_not_trusted(verified, peer_));
  }
  if (const unsigned alert = alert_of(error); alert != 0) {
    const char* text = refusal(alert);
    if (text != nullptr) fail(ErrorKind::untrusted, "the peer refuses this side's certificate: ", text);
    fail(ErrorKind::untrusted, "the peer ends the TLS handshake: ", in_words(error));
  }
  if (at_end_ || read_error_ != 0) {
    fail(ErrorKind::peer_lost,
         "the peer hung up during the TLS handshake: ", at_end_ ? "it may use none" : std::strerror(read_error_));
  }
  fail(ErrorKind::untrusted, "there was no TLS handshake: ", in_words(error));
}

// --- bytes ----------------------------------------------------------------------------------------------------------

// After an operation that failed for good: the reason, for later calls.
void Tls::note_failure() {
  if (failure_) return;
  const unsigned long error = take_error();
  const unsigned alert = alert_of(error);
  const char* text = refusal(alert);
  if (text != nullptr) {
    failure_ = {ErrorKind::untrusted, std::string("the peer refuses this side's certificate: ") + text};
  } else if (alert != 0) {
    failure_ = {ErrorKind::peer_lost, "the peer ended the connection: " + in_words(error)};
  } else {
    failure_ = {ErrorKind::frame, "what came is not what the peer wrote under TLS: " + in_words(error)};
  }
}

void Tls::check_failure() const {
  if (failure_) fail(failure_->first, failure_->second);
}

ssize_t Tls::receive(std::span<const struct iovec> parts) {
  const OpenSsl& api = openssl();
  const Inside in;
  if (!in) return errno = ECONNABORTED, -1;
  std::unique_lock lock(mutex_);
  check_failure();
  drained_ = false;
  unread_.store(true, std::memory_order_relaxed);
  size_t total = 0;
  for (const struct iovec& part : parts) {
    for (size_t at = 0; at < part.iov_len;) {
      size_t got = 0;
      api.ERR_clear_error();
      if (api.SSL_read_ex(ssl_, static_cast<std::byte*>(part.iov_base) + at, part.iov_len - at, &got) == 1) {
        at += got;
        total += got;
        lock.unlock();  // a record each: waiting senders get their turn
        lock.lock();
        continue;
      }
      const int why = api.SSL_get_error(ssl_, 0);
      unread_.store(false, std::memory_order_relaxed);
      if (why == OpenSsl::kErrorSsl && !at_end_ && read_error_ == 0) {
        note_failure();
        drain();  // the alert for the peer
        check_failure();
      }
      if (total != 0) return static_cast<ssize_t>(total);  // an end is still there the next time
      if (why == OpenSsl::kWantRead || why == OpenSsl::kWantWrite) return errno = EAGAIN, -1;
      if (read_error_ != 0) return errno = read_error_, -1;
      return 0;
    }
  }
  return static_cast<ssize_t>(total);
}

// Encrypts into out_. False when the stream is broken.
bool Tls::put(const std::byte* from, size_t bytes) {
  size_t written = 0;
  openssl().ERR_clear_error();
  return bytes == 0 || (openssl().SSL_write_ex(ssl_, from, bytes, &written) == 1 && written == bytes);
}

ssize_t Tls::send(std::span<const struct iovec> parts) {
  const OpenSsl& api = openssl();
  const Inside in;
  if (!in) return errno = ECONNABORTED, -1;
  std::lock_guard lock(mutex_);
  if (!drain()) return errno = EAGAIN, -1;
  if (write_error_ != 0) {
    // A peer that refuses this side sent the reason before it hung up.
    std::byte scrap;
    size_t got = 0;
    drained_ = false;
    api.ERR_clear_error();
    if (api.SSL_peek_ex(ssl_, &scrap, 1, &got) != 1 && api.SSL_get_error(ssl_, 0) == OpenSsl::kErrorSsl && !at_end_ &&
        read_error_ == 0) {
      note_failure();
    }
    check_failure();
    return errno = write_error_, -1;
  }
  size_t taken = 0;
  bool good = true;
  gathered_.clear();
  for (size_t i = 0; i < parts.size() && taken < kBatch && good; ++i) {
    const auto* from = static_cast<const std::byte*>(parts[i].iov_base);
    const size_t bytes = std::min(parts[i].iov_len, kBatch - taken);
    if (gathered_.size() + bytes > kRecord || bytes >= kGatherBelow) {
      good = put(gathered_.data(), gathered_.size());
      gathered_.clear();
    }
    if (bytes < kGatherBelow) {
      gathered_.insert(gathered_.end(), from, from + bytes);
    } else {
      good = good && put(from, bytes);
    }
    taken += bytes;
  }
  good = good && put(gathered_.data(), gathered_.size());
  sent_under_key_ += taken;
  if (good && sent_under_key_ >= context_->rekey_bytes_) {
    good = api.SSL_key_update(ssl_, 0) == 1;  // of this direction; the next record announces it
    sent_under_key_ = 0;
  }
  if (!good) return errno = EPIPE, -1;
  drain();
  return static_cast<ssize_t>(taken);
}

bool Tls::flush() {
  const Inside in;
  std::lock_guard lock(mutex_);
  return !in || drain();
}

// True when nothing is left, or can be sent any more.
bool Tls::drain() {
  while (out_sent_ != out_.size() && write_error_ == 0) {
    const ssize_t sent = ::send(socket_, out_.data() + out_sent_, out_.size() - out_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) out_sent_ += static_cast<size_t>(sent);
    if (sent < 0 && errno == EAGAIN) return false;
    if (sent < 0 && errno != EINTR) write_error_ = errno;
  }
  out_.clear();
  out_sent_ = 0;
  return true;
}

}  // namespace geartrain
