// OpenSSL 3, the part that TLS needs (tls.cc), loaded at run time: programs without TLS need no
// OpenSSL, neither to build nor to run. The prototypes are ours; those of OpenSSL 3 do not change within its major
// version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace geartrain {

struct SslContext;  // SSL_CTX
struct Ssl;         // SSL
struct Bio;         // BIO
struct BioMethod;   // BIO_METHOD

// Name, result and arguments of each.
#define GEARTRAIN_OPENSSL(F)                                                             \
  F(OPENSSL_init_ssl, int, (uint64_t, const void*))                                      \
  F(TLS_method, const void*, ())                                                         \
  F(SSL_CTX_new, SslContext*, (const void*))                                             \
  F(SSL_CTX_free, void, (SslContext*))                                                   \
  F(SSL_CTX_ctrl, long, (SslContext*, int, long, void*))                                 \
  F(SSL_CTX_set_ciphersuites, int, (SslContext*, const char*))                           \
  F(SSL_CTX_set_num_tickets, int, (SslContext*, size_t))                                 \
  F(SSL_CTX_set_default_passwd_cb, void, (SslContext*, int (*)(char*, int, int, void*))) \
  F(SSL_CTX_use_certificate_chain_file, int, (SslContext*, const char*))                 \
  F(SSL_CTX_use_PrivateKey_file, int, (SslContext*, const char*, int))                   \
  F(SSL_CTX_load_verify_locations, int, (SslContext*, const char*, const char*))         \
  F(SSL_CTX_set_verify, void, (SslContext*, int, const void*))                           \
  F(SSL_new, Ssl*, (SslContext*))                                                        \
  F(SSL_free, void, (Ssl*))                                                              \
  F(SSL_set_bio, void, (Ssl*, Bio*, Bio*))                                               \
  F(SSL_set_connect_state, void, (Ssl*))                                                 \
  F(SSL_set_accept_state, void, (Ssl*))                                                  \
  F(SSL_set_hostflags, void, (Ssl*, unsigned))                                           \
  F(SSL_set1_host, int, (Ssl*, const char*))                                             \
  F(SSL_get0_param, void*, (Ssl*))                                                       \
  F(SSL_do_handshake, int, (Ssl*))                                                       \
  F(SSL_read_ex, int, (Ssl*, void*, size_t, size_t*))                                    \
  F(SSL_peek_ex, int, (Ssl*, void*, size_t, size_t*))                                    \
  F(SSL_write_ex, int, (Ssl*, const void*, size_t, size_t*))                             \
  F(SSL_key_update, int, (Ssl*, int))                                                    \
  F(SSL_get_error, int, (const Ssl*, int))                                               \
  F(SSL_get_verify_result, long, (const Ssl*))                                           \
  F(SSL_get_current_cipher, const void*, (const Ssl*))                                   \
  F(SSL_CIPHER_get_name, const char*, (const void*))                                     \
  F(X509_VERIFY_PARAM_set1_ip_asc, int, (void*, const char*))                            \
  F(X509_verify_cert_error_string, const char*, (long))                                  \
  F(BIO_get_new_index, int, ())                                                          \
  F(BIO_meth_new, BioMethod*, (int, const char*))                                        \
  F(BIO_meth_set_read, int, (BioMethod*, int (*)(Bio*, char*, int)))                     \
  F(BIO_meth_set_write, int, (BioMethod*, int (*)(Bio*, const char*, int)))              \
  F(BIO_meth_set_ctrl, int, (BioMethod*, long (*)(Bio*, int, long, void*)))              \
  F(BIO_new, Bio*, (const BioMethod*))                                                   \
  F(BIO_set_data, void, (Bio*, void*))                                                   \
  F(BIO_get_data, void*, (Bio*))                                                         \
  F(BIO_set_init, void, (Bio*, int))                                                     \
  F(BIO_set_flags, void, (Bio*, int))                                                    \
  F(BIO_clear_flags, void, (Bio*, int))                                                  \
  F(ERR_clear_error, void, ())                                                           \
  F(ERR_get_error, unsigned long, ())                                                    \
  F(ERR_reason_error_string, const char*, (unsigned long))

struct OpenSsl {
#define GEARTRAIN_OPENSSL_MEMBER(name, result, arguments) result(*name) arguments = nullptr;
  GEARTRAIN_OPENSSL(GEARTRAIN_OPENSSL_MEMBER)
#undef GEARTRAIN_OPENSSL_MEMBER

  static constexpr uint64_t kNoAtExit = 0x00080000;                             // OPENSSL_INIT_NO_ATEXIT
  static constexpr int kMode = 33, kSessionCacheMode = 44, kMinProtocol = 123;  // SSL_CTRL_...
  static constexpr long kTls13 = 0x0304;
  static constexpr int kPem = 1, kVerifyPeer = 1, kFailWithoutCertificate = 2;
  static constexpr unsigned kNoWildcards = 0x2, kNeverTheSubject = 0x20;  // X509_CHECK_FLAG_...
  static constexpr int kErrorSsl = 1, kWantRead = 2, kWantWrite = 3;      // SSL_ERROR_...
  static constexpr int kRetryRead = 0x1 | 0x8;                            // BIO_FLAGS_READ | BIO_FLAGS_SHOULD_RETRY
  static constexpr int kBioSourceSink = 0x0400, kBioFlush = 11;
};

// Any thread. Throws not_viable where there is none, or none that fits.
const OpenSsl& openssl();
// Why it cannot be used, or empty.
std::string tls_not_viable();

}  // namespace geartrain
